"""A world of instances in one thread, with a clock turned by hand: whole schedules come from one seed."""

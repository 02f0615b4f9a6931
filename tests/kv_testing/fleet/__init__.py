"""Engines in processes of their own, what can be done to them, and the laws that hold whatever is done."""

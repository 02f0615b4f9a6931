"""Random play over a duel: faster than Hypothesis, for long runs.

In:  a Duel, a random source.
Out: as many operations as are asked for, compared after each.
Law: equal sources play equal operations.
"""

from kv_testing.duel_worlds import RETENTIONS, SCOPES


class Player:
    """Draws operations from a random source and plays them."""

    def __init__(self, duel, random):
        self.duel = duel
        self.random = random

    def play(self, num_steps):
        for _ in range(num_steps):
            self.step()
            self.duel.compare()

    def step(self):
        moves = (
            (30, lambda: self.duel.add(self.prompt(), **self.manners())),
            (4, lambda: self.duel.add_all([self.prompt() for _ in range(self.random.randrange(1, 5))])),
            (25, lambda: self.duel.decode(self.number(), self.tokens(self.random.choice((1, 1, 1, 2, 3, 5))))),
            (8, lambda: self.duel.publish(self.number(), self.filled(), partial=self.random.random() < 0.4)),
            (9, lambda: self.duel.rewind(self.number(), self.random.choice((1, 1, 2, 3, 5, 9)))),
            (16, self.release),
            (2, lambda: self.duel.pin(self.number())),
            (2, lambda: self.duel.unpin(self.number())),
            (2, lambda: self.duel.unpin_some(self.number(), self.positions())),
            (2, lambda: self.duel.make_writable(self.number(), self.random.randrange(8))),
            (2, lambda: self.duel.extend(self.number(), self.tokens(2))),
            (1, lambda: self.duel.grow(self.number(), self.random.choice((1, 2, 4, 9)))),
            (2, lambda: self.duel.wait(self.random.choice((1, 5, 20)))),
            (1, lambda: self.duel.dry_run([self.number(), self.number()])),
            (1, lambda: self.duel.set_priority(self.random.randrange(24), self.random.choice((5, 35, 80)))),
            (1, lambda: self.duel.move(self.random.randrange(24), up=self.random.random() < 0.5)),
            (1, self.twins),
            (4, lambda: self.duel.ask(self.prompt(), scope=self.random.choice((None, None, None, *SCOPES)))),
            (1, lambda: self.duel.lose([self.random.randrange(96) for _ in range(self.random.choice((1, 1, 3)))])),
        )
        [move] = self.random.choices([move for _, move in moves], [weight for weight, _ in moves])
        move()

    def release(self):
        pin = self.random.random() < 0.1
        publish = self.random.random() < 0.85
        self.duel.release(self.number(), publish=publish, num_filled=self.filled(), pin=pin)

    def twins(self):
        """Two requests publish equal content, and a pin holds some blocks of the second one."""
        prompt = [self.number(), *self.prompt()]
        self.duel.add(prompt)
        self.duel.add(prompt)
        newest = len(self.duel.beams) - 1
        self.duel.pin(newest)
        self.duel.unpin_some(len(self.duel.pins) - 1, range(self.random.randrange(4)))
        self.duel.publish(newest - 1, None, partial=False)
        self.duel.publish(newest, None, partial=False)

    def number(self):
        return self.random.randrange(64)

    def positions(self):
        first, last = sorted((self.random.randrange(8), self.random.randrange(12)))
        return range(first, last + 1)

    def filled(self):
        return self.random.randrange(40) if self.random.random() < 0.15 else None

    def tokens(self, amount):
        return [self.random.choice((1, 1, 1, 2, -1)) for _ in range(amount)]

    def prompt(self):
        length = self.random.choice((1, 3, 4, 5, 8, 9, 12, 13, 16, 17, 21, 30))
        base = [[1] * 30, [1, 2] * 15, [1] * 9 + [2] * 21, [3, 1, 1, 1] * 8][self.random.randrange(4)]
        tokens = base[:length]
        if self.random.random() < 0.3:
            tokens[self.random.randrange(len(tokens))] = self.random.choice((1, 2, 3))
        return tokens

    def manners(self):
        random = self.random
        manners = {"beams": random.choice((1, 1, 2, 3))}
        if random.random() < 0.15:
            manners["scope"] = random.choice(SCOPES)
        if random.random() < 0.05:
            manners["extra_ids"] = [random.choice((0, 7)) for _ in range(40)]
        if random.random() < 0.3:
            manners["retention"] = random.choice(RETENTIONS)
        manners["dummy"] = random.random() < 0.03
        manners["known"] = random.random() > 0.04
        return manners

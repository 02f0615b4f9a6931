"""The real manager and the naive one, given the same calls; every answer and every state is compared.

In:  operations with their arguments, from Hypothesis or from a random source.
Out: AssertionError where the two differ or where one of them breaks a law of its own.
Law: whatever an operation is asked to do, either both do it or both refuse, and afterwards both show the same: tables,
     free blocks of each tier, the tree with ids, tiers and priorities, copies with their places. Replaying the events
     gives the same tree.
"""

from collections import Counter

from kv_core.errors import CallerError, CapacityError
from kv_core.events import Created, Removed, Stored, Updated
from kv_core.keys import Scope, chain_keys, encoded_items, scope_key
from kv_core.manager import KVCacheManager
from kv_core.request import Request
from kv_core.spans import Span
from kv_core.tiers import Place, Tier
from kv_testing.naive_manager import NaiveManager
from kv_testing.packing import decoded, decoded_items, packed_tokens


class Duel:
    """See the module."""

    def __init__(self, world):
        self.world = world
        self.now = 0
        self.real = KVCacheManager(world.config(), clock_ms=lambda: self.now)
        self.naive = NaiveManager(world.config(), lambda: self.now)
        self.pins = []
        self.names = 0
        self.beams = {}
        self.mirror = {}
        self.ordinals = {}
        self.num_copies = 0
        self.copies_taken = 0

    # Operations. Each picks its request by number, so that any number means something.

    def add(self, tokens, *, beams=1, scope=None, extra_ids=None, retention=None, dummy=False, known=True):
        tokens = tokens[: self.world.max_length]
        beams = min(beams, self.world.beams)
        self.names += 1
        request = Request(
            f"r{self.names}",
            tokens if known else None,
            scope or Scope(),
            num_tokens=len(tokens),
            extra_ids=extra_ids[: len(tokens)] if extra_ids and known else None,
            retention=retention,
            is_dummy=dummy,
        )
        try:
            probe = self.real.probe(request, beam_width=beams)
            free = {window.window: self.real.num_free(window.window) for window in self.world.windows}
            admission = self.real.add(request, beam_width=beams)
        except CapacityError:
            return
        expected = self.naive.add(request, beams)
        assert (admission is None) == (expected is None)
        assert probe.fits == (admission is not None)
        if admission is not None:
            assert admission.num_cached == expected == probe.num_cached
            self.beams[request.request_id] = beams
            used = {size: before - self.real.num_free(size) for size, before in free.items()}
            assert used == probe.num_used

    def add_all(self, prompts):
        requests = []
        for tokens in prompts:
            self.names += 1
            requests.append(Request(f"r{self.names}", tokens[: self.world.max_length]))
        try:
            admissions = self.real.add_all(requests)
        except CapacityError:
            return
        expected = self.naive.add_all(requests)
        assert [None if one is None else one.num_cached for one in admissions] == expected
        self.beams |= {request.request_id: 1 for request, one in zip(requests, admissions, strict=True) if one}

    def grow(self, number, num_tokens):
        name = self.pick(number)
        if name is None or self.world.cross:
            return
        before = self.real.num_tokens(name)
        try:
            grown = self.real.grow(name, num_tokens)
        except (CapacityError, CallerError):
            assert self.real.num_tokens(name) == before
            return
        assert grown == self.naive.grow(name, num_tokens)

    def extend(self, number, tokens):
        name = self.pick(number)
        if name is not None:
            self.real.extend(name, tokens)
            self.naive.extend(name, tokens)

    def decode(self, number, tokens):
        name = self.pick(number)
        if name is None or self.world.cross:
            return
        before = self.real.num_tokens(name)
        self.grow(number, len(tokens))
        if self.real.num_tokens(name) > before:
            self.extend(number, tokens)

    def rewind(self, number, num_tokens):
        name = self.pick(number)
        if name is None:
            return
        try:
            done = self.real.rewind(name, num_tokens)
        except CallerError:
            return
        assert done == self.naive.rewind(name, num_tokens)

    def publish(self, number, num_filled, *, partial):
        name = self.pick(number)
        if name is not None:
            self.real.publish(name, num_filled, partial=partial)
            self.naive.publish(name, num_filled, partial=partial)

    def release(self, number, *, publish=True, num_filled=None, pin=False):
        name = self.pick(number)
        if name is None:
            return
        pinned = self.real.release(name, publish=publish, num_filled=num_filled, pin=pin)
        expected = self.naive.release(name, publish=publish, num_filled=num_filled, pin=pin)
        del self.beams[name]
        if pin:
            self.pins.append((pinned, expected))

    def pin(self, number):
        name = self.pick(number)
        if name is not None:
            self.pins.append((self.real.pin(name), self.naive.pin(name)))

    def unpin(self, number):
        if self.pins:
            real, naive = self.pins.pop(number % len(self.pins))
            self.real.unpin(real)
            self.naive.unpin(naive)

    def unpin_some(self, number, positions):
        """Blocks of one window of one pin, by their positions in it."""
        if not self.pins:
            return
        real, naive = self.pins[number % len(self.pins)]
        at = number % len(self.world.windows)
        size = self.world.windows[at].window
        listed = real.block_ids[size]
        given = {listed[position] for position in positions if position < len(listed)} - real.waiting[size]
        self.real.unpin(real, {size: given})
        self.naive.unpin(naive, at, given)
        assert sorted(sum(real.block_ids.values(), ())) == sorted(
            block.block_id for _, _, blocks in naive.held for block in blocks
        )
        if not naive.held:
            self.pins.remove((real, naive))

    def make_writable(self, number, ordinal):
        name = self.pick(number)
        if name is None:
            return
        try:
            done = self.real.make_writable(name, ordinal)
        except CallerError:
            return
        assert done == self.naive.make_writable(name, ordinal)

    def wait(self, milliseconds):
        self.now += milliseconds
        assert self.real.refresh() == self.naive.refresh()

    def dry_run(self, numbers):
        """Supposing that requests end counts the blocks that nobody else holds."""
        dry = self.real.dry_run()
        names = {self.pick(number) for number in numbers} - {None}
        for name in names:
            dry.release(name)
        for at, window in enumerate(self.world.windows):
            assert dry.num_free(window.window) == self.naive.num_free_without(names, at)

    def set_priority(self, block_id, priority):
        size = self.world.windows[0].window
        if block_id < self.world.windows[0].num_device and self.world.beams == 1:
            assert self.real.set_priority(size, block_id, priority) == self.naive.set_priority(0, block_id, priority)

    def move(self, block_id, *, up):
        size = self.world.windows[0].window
        if block_id < sum(self.world.windows[0].num_blocks):
            move, expected = (self.real.onboard, self.naive.onboard) if up else (self.real.offload, self.naive.offload)
            assert move(size, block_id) == expected(0, block_id)

    def lose(self, numbers):
        """The bytes of blocks of all windows are lost; whoever holds one ends."""
        lost, places = [], []
        for number in numbers:
            at = number % len(self.world.windows)
            window = self.world.windows[at]
            block_id = number % sum(window.num_blocks)
            view = self.real.inspect(window.window, block_id)
            lost.append((at, block_id))
            places.append(Place(window.window, view.tier, view.slot))
        try:
            victims = self.real.lost(places)
        except CallerError:
            assert self.naive.lost(lost) is None, "only what is pinned cannot be lost"
            return
        assert list(victims) == self.naive.lost(lost)
        for name in victims:
            del self.beams[name]

    def ask(self, tokens, *, scope=None, extra_ids=None):
        """What is there of a prompt, and up to where it would have to be computed."""
        tokens = tokens[: self.world.max_length]
        extra_ids = extra_ids[: len(tokens)] if extra_ids else None
        request = Request("asked", tokens, scope or Scope(), extra_ids=extra_ids)
        for at, window in enumerate(self.world.windows):
            found = self.real.lookup(request, window.window)
            assert (found.num_tokens, found.block_ids) == self.naive.lookup(request, at)
        missing = self.real.missing_prefix(request)
        assert (None if missing is None else missing.num_tokens) == self.naive.num_missing(request)
        if missing is not None:
            told = packed_tokens(tokens[: missing.num_tokens], extra_ids)
            assert missing.content == told
            items = [item for item in request.scope.extras if item[1] < missing.num_tokens]
            assert list(missing.scope.extras) == items

    def pick(self, number):
        names = list(self.beams)
        return names[number % len(names)] if names else None

    # Comparing.

    def compare(self):
        self.real.check()
        self.naive.check()
        for at, window in enumerate(self.world.windows):
            for name, beams in self.beams.items():
                for beam in range(beams):
                    ours = self.real.block_ids(name, window.window, beam)
                    assert ours == self.naive.block_ids(name, at, beam), (name, window.window, beam)
            stats = self.real.stats()
            for tier in Tier:
                assert self.real.num_free(window.window, tier) == self.naive.windows[at].num_free(tier)
                hits = stats.windows[at].tiers[tier].num_hit_tokens
                assert hits == self.naive.windows[at].hit_tokens[tier], "what was found is counted where it lay"
            assert self.cached(at) == self.naive.tree(at)
        self.compare_copies()
        if self.world.events:
            self.compare_events()

    def compare_copies(self):
        orders = self.real.take_copies()
        ours = [((order.source[1:]), (order.destination[1:]), order.num_tokens) for order in orders]
        theirs = [(source, destination, num) for source, destination, num in self.naive.copies]
        assert ours == theirs
        self.naive.copies.clear()

    def cached(self, at):
        """Every cached block of a window, as `NaiveManager.tree` tells it."""
        window = self.real._registry.windows[at]
        found = {}
        for root in window.tree.roots.values():
            scope = (root.scope_key[0], root.scope_key[1], root.width == 16)
            waiting: list[tuple] = [(child, (scope,)) for child in root.children.values()]
            while waiting:
                run, path = waiting.pop()
                tokens = decoded(run.content(), root.width)
                for inside in range(run.count):
                    block = tuple(tokens[inside * window.tokens_per_block : (inside + 1) * window.tokens_per_block])
                    path = (*path, (block, decoded_items(run.items)))
                    if inside >= run.num_gone:
                        found[path] = (run.ids[inside - run.num_gone], run.tier, run.priority, run.holders > 0)
                waiting += [(child, path) for child in run.children.values()]
        return found

    def compare_events(self):
        """What a reader of all events believes is what the trees hold."""
        self.real.flush_events()
        for event in self.real.take_events():
            self.replay(event.window, event.payload)
        expected = Counter()
        for at, window in enumerate(self.world.windows):
            for _, tier, priority, _ in self.naive.tree(at).values():
                expected[window.window, tier, priority] += 1
        assert Counter((size, *known) for (size, _), known in self.mirror.items()) == expected
        snapshot = {}
        for event in self.real.snapshot():
            for block in event.payload.blocks:
                snapshot[event.window, block.key] = (block.tier, block.priority)
        assert snapshot == self.mirror

    def replay(self, window, payload):
        if isinstance(payload, Stored):
            if payload.parent is not None and not self.real.config.is_sliding(window):
                assert (window, payload.parent) in self.mirror, "a chain hangs on a known block"
            self.check_keys(window, payload)
            for block in payload.blocks:
                assert (window, block.key) not in self.mirror, "a block is stored once"
                self.mirror[window, block.key] = (block.tier, block.priority)
        elif isinstance(payload, Removed):
            for key in payload.keys:
                del self.mirror[window, key]
        elif isinstance(payload, Updated):
            tier, priority = self.mirror[window, payload.key]
            if payload.tier is not None:
                assert payload.tier.old == tier
                tier = payload.tier.new
            if payload.priority is not None:
                assert payload.priority.old == priority
                priority = payload.priority.new
            self.mirror[window, payload.key] = (tier, priority)
        else:
            assert isinstance(payload, Created)

    def check_keys(self, window, stored):
        """What is told of blocks is all that decides their keys: scope, items and tokens.

        Behind blocks that a sliding window dropped untold the place is not known, so items are looked for nowhere.
        """
        parent = scope_key(stored.scope) if stored.parent is None else stored.parent
        ordinal = self.ordinals.get((window, stored.parent), 0)
        assert stored.parent is not None or ordinal == 0
        if stored.parent is not None and not ordinal:
            return
        items = encoded_items(stored.scope, self.world.tokens_per_block)
        for block in stored.blocks:
            content = packed_tokens(block.tokens, block.extra_ids)
            size = self.world.tokens_per_block * (4 if block.extra_ids is None else 16)
            span = Span(ordinal, ordinal + 1)
            [parent] = chain_keys(parent, content, size, span, items, plain=block.extra_ids is None)
            assert parent == block.key, "a key follows from what is told"
            ordinal += 1
            self.ordinals[window, block.key] = ordinal

    def finish(self):
        """When all is given back, everything is free."""
        while self.beams:
            self.release(0)
            self.compare()
        while self.pins:
            self.unpin(0)
        self.compare()
        for window in self.world.windows:
            for tier, amount in zip(Tier, window.num_blocks, strict=True):
                assert self.real.num_free(window.window, tier) == amount

"""A model without numbers: it proves that every row sees the entries of its own tokens, and only those.

The next token is a hash of all tokens before it, of the seed and of the output position. The cache
holds, in place of K and V, the hash of the token prefix that each entry stands for; a slot holds that of all
tokens fed. Every step checks all that a row could see, so a wrong page, slot, position or length fails at once.
Used by the scheduler's tests.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

import numpy as np

from jaxinfer.cache import CacheSpec, Scope
from jaxinfer.cache.spec import Field
from jaxinfer.config import EngineConfig
from jaxinfer.layout import LoadOp, RowField, RowFlag
from jaxinfer.scheduler import LoadPlan, Scheduler, Sequence, StepOutput, StepPlan, Update
from jaxinfer.types import FinishReason, Request, SamplingParams

VOCAB = 997
FULL = CacheSpec("full", Scope.TOKEN, (0,), (Field("k", (1, 4), "float32"),))


def window(size: int) -> CacheSpec:
    return CacheSpec(f"window{size}", Scope.WINDOW, (1,), (Field("k", (1, 4), "float32"),), 1, size)


def state(name: str = "state") -> CacheSpec:
    return CacheSpec(name, Scope.STATE, (2,), (Field(name, (4,), "float32"),))


def mix(*parts: int) -> int:
    """A small deterministic hash of ints."""
    state = 1469598103934665603
    for part in parts:
        state = ((state ^ (part + 1)) * 1099511628211 + 12345) % (1 << 61)
    return state


def request(key: str, prompt: list[int] | tuple[int, ...], max_tokens: int, **options) -> Request:
    fields = {f: options.pop(f) for f in list(options) if f in Request.__dataclass_fields__}
    stop_ids = frozenset(fields.pop("stop_ids", ()))
    params = SamplingParams(max_tokens=max_tokens, **options)
    fields = {"banned_ids": (), "seed": 7, **fields}
    return Request(key, tuple(prompt), params, stop_ids, max_tokens=max_tokens, **fields)


class Truth:
    """What a request yields when it runs alone: all tokens up to its limit, and their prefix hashes."""

    def __init__(self, req: Request, limit: int) -> None:
        self.tokens = list(req.prompt_token_ids)
        self.prompt = len(self.tokens)
        self.chain: list[int] = []
        for token in self.tokens:
            self._extend(token)
        for place in range(limit):
            token = sample(self.chain[-1], req.seed, place)
            self.tokens.append(token)
            self._extend(token)
        self.output = self.tokens[self.prompt :]
        for place, token in enumerate(self.output):
            if token in req.stop_ids and place + 1 >= req.params.min_tokens:
                self.output = self.output[: place + 1]
                break

    def _extend(self, token: int) -> None:
        self.chain.append(mix(self.chain[-1] if self.chain else 0, token))


def sample(chain: int, seed: int, place: int) -> int:
    return mix(chain, seed, place) % VOCAB


@dataclass
class Slot:
    prompt: set[int]
    output: Counter[int]
    banned: set[int]
    bias: dict[int, float]
    fill: float


class NullModel:
    """Runs plans in the order in which they were made, as a device does."""

    def __init__(self, scheduler: Scheduler, config: EngineConfig, specs: tuple[CacheSpec, ...]):
        self.scheduler, self.config, self.specs = scheduler, config, specs
        self.size = config.page_size
        self.entries: list[dict[tuple[int, int], tuple[int, int]]] = [{} for _ in specs]
        self.kinds = [k for k, spec in enumerate(specs) if spec.scope is Scope.STATE]
        self.states: dict[tuple[int, int], tuple[int, int]] = {}  # (kind, slot) -> (position, hash)
        self._writes: dict[tuple[int, int], tuple[int, int]] = {}
        self._users: dict[tuple[int, int], Sequence] = {}  # who reads or writes a slot in this step
        self.written: dict[
            tuple[int, int], int
        ] = {}  # (kind, slot) -> number of the last step that wrote it
        self.last_token = [0] * (config.rows + 1)
        self.slots: dict[int, Slot] = {}
        self.truths: dict[str, Truth] = {}
        self.steps = self.fed = 0
        self.poison: set[str] = set()  # requests whose logits are NaN

    def load(self, plan: LoadPlan) -> None:
        assert len(plan.resets) <= 32 and len(plan.entries) <= 1024
        for slot, fill in plan.resets:
            self.slots[slot] = Slot(set(), Counter(), set(), {}, fill)
        for slot, token, op, value in plan.entries:
            if slot not in self.slots:  # its sequence ended when an earlier load failed
                continue
            state = self.slots[slot]
            if op is LoadOp.PROMPT:
                state.prompt.add(token)
            elif op is LoadOp.OUTPUT:
                state.output[token] += 1
            elif op is LoadOp.BAN:
                state.banned.add(token)
            else:
                state.bias[token] = value

    def run(self, plan: StepPlan) -> StepOutput:
        shape = plan.shape
        assert shape in self.config.ladder()
        assert len(plan.decode) <= shape.rows and len(plan.blocks) <= shape.blocks
        assert len(plan.decode) + len(plan.tokens) <= self.config.max_num_batched_tokens
        assert len(plan.tokens) == len(plan.targets) == plan.blocks[:, 2].sum()
        self.steps += 1
        self.fed += len(plan.decode) + len(plan.tokens)
        tokens = np.zeros(shape.sample_rows, np.int32)
        owners = dict(plan.sampled)
        for row, record in enumerate(plan.decode):
            fed = [self.last_token[record[RowField.SLOT]]]
            assert record[RowField.LENGTH] == 1 and record[RowField.BLOCKS] == 0
            tokens[row] = self._row(record, fed, owners[row])
            self._go_on(record, owners[row], [(int(record[RowField.START]) + 1, None)])
        for index, (sequence, fed, record) in enumerate(self._chunks(plan)):
            row = shape.rows + index
            assert (row in owners) == bool(record[RowField.FLAGS] & RowFlag.SAMPLE)
            tokens[row] = self._row(record, fed, sequence)
            blocks = [b for b in plan.blocks.tolist() if b[0] == index]
            self._go_on(record, sequence, [(b[1] + b[2], b[3:]) for b in blocks])
        self.states |= self._writes
        self.written |= dict.fromkeys(self._writes, self.steps)
        self._writes, self._users = {}, {}
        return StepOutput(tokens)

    def _go_on(self, record: np.ndarray, sequence: Sequence, ends: list) -> None:
        """Read the states at the row's start, write those at its blocks' ends (None: the row's own slots)."""
        layout, chain, start = (
            self.scheduler.layout,
            self.truth(sequence).chain,
            int(record[RowField.START]),
        )
        owners = self.scheduler._pages.tree._owner
        for place, kind in enumerate(self.kinds):
            column = layout.base_column(kind)
            read = int(record[column])
            assert (read == 0) == (start == 0)
            if read:
                got = self.states.get((kind, read))
                assert got == (start, chain[start - 1]), "a row goes on from what is not its own"
                assert self._users.setdefault((kind, read), sequence) is sequence or (
                    read in owners[kind]
                ), "two rows read a slot that is no checkpoint"
            for position, slots in ends:
                slot = int(record[column + 1]) if slots is None else slots[place]
                if not slot:
                    continue
                key = (kind, slot)
                assert key not in self._writes, "two blocks write to one slot"
                assert slot not in owners[kind], "a checkpoint is written"
                assert self._users.setdefault(key, sequence) is sequence, "another row's slot"
                self._writes[key] = (position, chain[position - 1])
            last = ends[-1][1]
            assert record[column + 1] if last is None else last[place], "the state is lost"

    def _chunks(self, plan: StepPlan):
        cursor = 0
        assert list(plan.blocks[:, 0]) == sorted(plan.blocks[:, 0])
        for index, ((sequence, end), record) in enumerate(
            zip(plan.chunks, plan.prefill, strict=True)
        ):
            blocks = [b for b in plan.blocks.tolist() if b[0] == index]
            start, block = int(record[RowField.START]), plan.shape.block
            assert len(blocks) == record[RowField.BLOCKS] > 0
            assert [b[1] for b in blocks] == [start, *(b[1] + b[2] for b in blocks[:-1])]
            assert all(0 < b[2] <= block for b in blocks)
            assert self.kinds or all(b[2] == block for b in blocks[:-1])
            length = sum(b[2] for b in blocks)
            assert length == record[RowField.LENGTH] and start + length == end
            fed = plan.tokens[cursor : cursor + length].tolist()
            targets = plan.targets[cursor : cursor + length].tolist()
            assert targets == (sequence.tokens + [0])[start + 1 : end + 1]
            cursor += length
            yield sequence, fed, record

    def truth(self, sequence: Sequence) -> Truth:
        key = sequence.request.request_id
        if key not in self.truths:
            self.truths[key] = Truth(sequence.request, sequence.limit)
        return self.truths[key]

    def _row(self, record: np.ndarray, fed: list[int], sequence: Sequence) -> int:
        truth = self.truth(sequence)
        start, slot = int(record[RowField.START]), int(record[RowField.SLOT])
        end = start + len(fed)
        assert 0 < slot <= self.config.rows and end <= len(truth.tokens)
        if sequence.finish_reason is None:
            assert slot == sequence.slot
            assert fed == truth.tokens[start:end], "a row was fed tokens of somebody else"
        for kind in (k for k in range(len(self.specs)) if k not in self.kinds):
            self._read_and_write(kind, record, sequence, start, end)
        if not record[RowField.FLAGS] & RowFlag.SAMPLE:
            return 0
        place = int(record[RowField.OUT_POS])
        assert place == end - truth.prompt
        low, high = record[[RowField.SEED_LOW, RowField.SEED_HIGH]].view(np.uint32).tolist()
        token = sample(truth.chain[end - 1], low | high << 32, place)
        self._check_slot(record, sequence, place, token)
        self.last_token[slot] = token
        return -1 if sequence.request.request_id in self.poison else token

    def _read_and_write(
        self, kind: int, record: np.ndarray, sequence: Sequence, start: int, end: int
    ) -> None:
        layout, chain = self.scheduler.layout, self.truth(sequence).chain
        base = int(record[layout.base_column(kind)])
        table = record[layout.table_slice(kind)].tolist()
        seen = self.specs[kind].window
        first = max(0, start - seen + 1) if seen else 0
        pool = self.scheduler._pages.tree.pools[kind]
        for position in range(first, end):
            page = table[position // self.size - base]
            assert page > 0 and position // self.size >= base, "a visible page is not in the table"
            where = (page, position % self.size)
            if position < start:
                got = self.entries[kind].get(where)
                assert got == (position, chain[position]), "a row reads what is not its own"
            else:
                if sequence.finish_reason is None:
                    assert pool.refs[page] == 1, "a row writes to a shared page"
                self.entries[kind][where] = (position, chain[position])

    def _check_slot(self, record: np.ndarray, sequence: Sequence, place: int, token: int) -> None:
        flags, req, params = record[RowField.FLAGS], sequence.request, sequence.request.params
        early = place < params.min_tokens and bool(req.banned_ids)
        assert bool(flags & RowFlag.MIN_TOKENS) == early
        if sequence.finish_reason is not None:
            return
        state = self.slots.get(int(record[RowField.SLOT]))
        if flags & RowFlag.COUNTS:
            assert state is not None
            done = self.truth(sequence).tokens[len(req.prompt_token_ids) :][:place]
            assert state.output == Counter(done), "penalty counts are wrong"
            if params.repetition_penalty != 1.0:
                assert state.prompt == set(req.prompt_token_ids)
            assert state.banned == (set(req.banned_ids) if params.min_tokens else set())
            state.output[token] += 1
        if flags & RowFlag.BIAS:
            assert state is not None
            if params.allowed_token_ids is None:
                assert state.fill == 0.0 and state.bias == params.logit_bias
            else:
                assert state.fill == -np.inf
                assert state.bias.keys() == set(params.allowed_token_ids)


class Runner:
    """Drives a scheduler as the engine does, with or without one step in flight."""

    def __init__(
        self,
        specs: tuple[CacheSpec, ...] = (FULL,),
        num_pages: tuple[int, ...] = (200,),
        max_model_len: int = 512,
        check: bool = True,
        depth: int = 1,
        **config,
    ) -> None:
        config = {"page_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64, **config}
        config = {"checkpoint_interval": 8, **config}
        self.config = EngineConfig(**config)
        self.scheduler = Scheduler(self.config, specs, num_pages, max_model_len)
        self.model = NullModel(self.scheduler, self.config, specs)
        self.inflight: deque[tuple[StepPlan, StepOutput]] = deque()
        self.check = check
        self.depth = depth if self.config.overlap else 0  # steps left in flight after a round
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}
        self.streamed: dict[str, list[int]] = {}

    def add(self, req: Request) -> Sequence:
        return self.scheduler.add(req)

    def launch(self) -> bool:
        """Plan and dispatch one step; False if there is nothing to run."""
        plan = self.scheduler.plan()
        if isinstance(plan, LoadPlan):
            self.model.load(plan)
        elif plan is not None:
            if plan.load is not None:
                self.model.load(plan.load)
            self.inflight.append((plan, self.model.run(plan)))
        return plan is not None

    def collect(self) -> list[Update]:
        plan, output = self.inflight.popleft()
        updates = self.scheduler.commit(plan, output)
        for update in updates:
            self.note(update)
        return updates

    def note(self, update: Update) -> None:
        key = update.sequence.request.request_id
        if update.token is not None:
            self.streamed.setdefault(key, []).append(update.token)
        if update.finish_reason is not None:
            assert key not in self.reasons, "a sequence ended twice"
            self.reasons[key] = update.finish_reason
            self.outputs[key] = update.sequence.output

    def round(self) -> None:
        launched = self.launch()
        depth = self.depth if launched else 0
        assert launched or self.inflight or not self.scheduler.has_work(), "nothing can proceed"
        while len(self.inflight) > depth:
            self.collect()
        if self.check:
            self.scheduler.check()
            self.check_tree()

    def forget(self) -> None:
        """The device loses its state."""
        self.model.entries = [{} for _ in self.model.specs]
        self.model.states, self.model.written = {}, {}

    def check_tree(self) -> None:
        """What the tree gives out is what the tokens that lead there left, and its steps are committed."""
        model, committed = self.model, self.model.steps - len(self.inflight)
        nodes = [(root, 0, 0) for root in self.scheduler._pages.tree._roots.values()]
        while nodes:
            node, position, chain = nodes.pop()
            for token in node.key if node.parent else ():
                position, chain = position + 1, mix(chain, token)
            for kind, page in enumerate(node.pages):
                if page and kind in model.kinds:
                    assert model.states[kind, page] == (position, chain), "a wrong state was kept"
                    assert model.written[kind, page] <= committed, "a state was kept too early"
                elif page:
                    last = model.entries[kind][page, model.size - 1]
                    assert last == (position - 1, chain), "a wrong page was kept"
            nodes += [(child, position, chain) for child in node.children.values()]

    def drain(self, rounds: int = 20000) -> None:
        """Run until idle."""
        for _ in range(rounds):
            if not self.scheduler.has_work() and not self.inflight:
                break
            self.round()
        else:
            raise AssertionError("the scheduler does not come to an end")
        self.scheduler.check()

    def expect(self, req: Request) -> None:
        """The request ended with the tokens of its solo run, each streamed once."""
        truth = self.model.truths[req.request_id]
        assert self.outputs[req.request_id] == truth.output
        assert self.streamed.get(req.request_id, []) == truth.output

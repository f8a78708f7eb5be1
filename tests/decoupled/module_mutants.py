"""Seeded mistakes in the tensor side of decoupled backpropagation: what would we notice?

Each is one small edit of replica.py, passes.py, module.py or network.py, loaded beside the real
ones; the tests of modules are loaded on top of them and must fail.

    python tests/decoupled/module_mutants.py        prints the table
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType

import torch

import gruppetto.decoupled

SOURCE = Path(gruppetto.decoupled.__file__).parent
TESTS = Path(__file__).parent
#: Imported in this order: each may import those before it.
MODULES = ("replica", "passes", "module", "network")
#: They see the modules above, the tests of the cheaper file first.
JUDGES = ("lockstep", "test_module_details", "test_module")


@dataclass(frozen=True)
class Mutant:
    """An edit of one module: ``old`` occurs once in it and becomes ``new``.

    ``by`` begins the name of the test that is known to notice it, parameters included.
    """

    name: str
    module: str
    old: str
    new: str
    by: str


MUTANTS = (
    # ------------------------------------------------------------------ weights of a pass
    Mutant(
        "weights not copied for a pass",
        "passes",
        "        replica.flat.copy_(weights)\n",
        "",
        "test_gradients_are_those_of_the_definition[ddg",
    ),
    Mutant(
        "one copy too few",
        "passes",
        "            return self.delay + 1\n",
        "            return self.delay\n",
        "test_gradients_are_those_of_the_definition[ddg",
    ),
    Mutant(
        "a copy taken that is still in use",
        "passes",
        "replica = flight.replica = self._replicas[mini_batch % len(self._replicas)]",
        "replica = flight.replica = self._replicas[mini_batch // 2 % len(self._replicas)]",
        "test_gradients_are_those_of_the_definition[ddg",
    ),
    Mutant(
        "copies counted otherwise after a resume",
        "passes",
        "            replica = self._replicas[mini_batch % len(self._replicas)]\n",
        "            replica = self._replicas[(mini_batch + 1) % len(self._replicas)]\n",
        "test_stopping_in_flight_and_going_on_changes_no_bit[fdg",
    ),
    Mutant(
        "weights of copies not in their vector",
        "replica",
        "                copied.data = views[slot]\n",
        "",
        "test_gradients_are_those_of_the_definition[ddg",
    ),
    Mutant(
        "a replay runs on weights of its own",
        "passes",
        'flat = server.weights if self.keeps == "input" else None',
        "flat = None",
        "test_gradients_are_those_of_the_definition[fr",
    ),
    Mutant(
        "gradients looked for in the live weights",
        "passes",
        "return self._live if flight.replica is None else flight.replica.parameters",
        "return self._live",
        "test_gradients_are_those_of_the_definition[ddg",
    ),
    # ------------------------------------------------------------------ looking ahead
    Mutant(
        "weights before not remembered",
        "passes",
        "            self._before.copy_(self._server.weights)\n",
        "            pass\n",
        "test_looking_ahead",
    ),
    Mutant(
        "looks back",
        "passes",
        "replica.flat.add_(moved, self._ahead)",
        "replica.flat.add_(moved, -self._ahead)",
        "test_looking_ahead",
    ),
    Mutant(
        "looks one update ahead whatever the delay",
        "passes",
        "self._ahead = method.leap(place.number)",
        "self._ahead = method.leap(place.modules - 1) and method.leap(place.modules - 1) / 2",
        "test_looking_ahead",
    ),
    Mutant(
        "weights before not saved",
        "module",
        "            tensors.update(self._runner.tensors())\n",
        "            tensors.update({n: t * 0 for n, t in self._runner.tensors().items()})\n",
        "test_stopping_in_flight_and_going_on_changes_no_bit[ddg:lookahead",
    ),
    Mutant(
        "weights before not taken back",
        "module",
        "        self._runner.load(snapshot.tensors)\n",
        "",
        "test_stopping_in_flight_and_going_on_changes_no_bit[ddg:lookahead",
    ),
    # ------------------------------------------------------------------ random numbers
    Mutant(
        "modules share a stream",
        "passes",
        "number = (mini_batch << 16) + self._place.number",
        "number = mini_batch << 16",
        "test_each_module_draws",
    ),
    Mutant(
        "mini-batches share a stream",
        "passes",
        "number = (mini_batch << 16) + self._place.number",
        "number = self._place.number",
        "test_each_module_draws",
    ),
    Mutant(
        "the first module has another stream than plain training",
        "passes",
        "        if self._place.is_first:\n            seed_everything(self._seed",
        "        if self._place.is_first:\n            seed_everything(self._seed + 1",
        "test_one_module_is_plain_training",
    ),
    Mutant(
        "a replay draws anew",
        "passes",
        "        flight.replica.detach_buffers(flight.others)\n"
        "        self._run(mini_batch, flight",
        "        flight.replica.detach_buffers(flight.others)\n"
        "        self._run(mini_batch + 1, flight",
        "test_a_replay_draws",
    ),
    # ------------------------------------------------------------------ buffers
    Mutant(
        "buffers move at a replay",
        "passes",
        "        flight.replica.detach_buffers(flight.others)\n",
        "        flight.replica.share_buffers()\n",
        "test_statistics_move_once_for_each_mini_batch[fr",
    ),
    Mutant(
        "buffers move at a resume",
        "passes",
        "        flight.replica = replica\n        replica.detach_buffers(flight.others)\n",
        "        flight.replica = replica\n        replica.share_buffers()\n",
        "test_stopping_in_flight_and_going_on_changes_no_bit[ddg",
    ),
    Mutant(
        "copies keep buffers to themselves",
        "replica",
        "            mine._buffers[name] = live._buffers[name]\n",
        "            pass\n",
        "test_statistics_move_once_for_each_mini_batch[ddg",
    ),
    Mutant(
        "a replay writes to the live buffers",
        "replica",
        "mine._buffers[name] = None if buffer is None else buffer.clone()",
        "mine._buffers[name] = buffer",
        "test_statistics_move_once_for_each_mini_batch[fr",
    ),
    Mutant(
        "a replay reads the buffers of now",
        "replica",
        "            module._buffers[name] = value.clone()\n",
        "            del value\n",
        "test_what_reads_its_buffers",
    ),
    Mutant(
        "a new buffer stays with the copy",
        "passes",
        "            flight.replica.hand_back_buffers()\n",
        "            pass\n",
        "test_what_reads_its_buffers",
    ),
    Mutant(
        "buffers that are read are not remembered",
        "passes",
        "[module.get_buffer(name).clone() for module, name in self._others]",
        "[torch.zeros_like(module.get_buffer(name)) for module, name in self._others]",
        "test_what_reads_its_buffers",
    ),
    Mutant(
        "the probe moves buffers",
        "network",
        "            buffer.copy_(value)\n",
        "",
        "test_statistics_move_once_for_each_mini_batch[bp",
    ),
    Mutant(
        "an evaluated version lacks its buffers",
        "network",
        'named.update({f"buffer/{n}": b for n, b in self._evaluated.named_buffers()})',
        "named.update({})",
        "test_statistics_move_once_for_each_mini_batch[bp",
    ),
    # ------------------------------------------------------------------ gradients
    Mutant(
        "the shrink is not applied",
        "module",
        "gradient if self._shrink == 1.0 else gradient * self._shrink",
        "gradient",
        "test_gradients_are_those_of_the_definition[fdg",
    ),
    Mutant(
        "the shrink is applied twice",
        "module",
        "gradient if self._shrink == 1.0 else gradient * self._shrink",
        "gradient * self._shrink**2",
        "test_gradients_are_those_of_the_definition[fdg",
    ),
    Mutant(
        "absent gradients are zeros",
        "module",
        "                absent.append(index)\n",
        "",
        "test_weights_without_a_gradient",
    ),
    Mutant(
        "an infinite gradient is applied",
        "module",
        "        if not self._gathered.is_finite():\n",
        "        if False:\n",
        "test_a_gradient_that_is_not_finite",
    ),
    Mutant(
        "an infinite loss is run backward",
        "passes",
        "            if flight.loss - flight.loss != 0.0:\n",
        "            if False:\n",
        "test_a_loss_that_is_not_finite",
    ),
    Mutant(
        "a stage without weights is run backward",
        "module",
        "pairs = [(t, g) for t, g in zip(floating, gradients, strict=True) if t.requires_grad]",
        "pairs = list(zip(floating, gradients, strict=True))",
        "test_modules_without_weights_and_frozen_ones",
    ),
    Mutant(
        "gradients for whole numbers",
        "module",
        "            if not tensor.requires_grad:\n                continue\n",
        "",
        "test_what_crosses_a_cut",
    ),
    Mutant(
        "a tuple is unpacked",
        "network",
        "takes_tuple=number > 1 and probe.tuples[number - 2]",
        "takes_tuple=number > 2 and probe.tuples[number - 2]",
        "test_what_crosses_a_cut",
    ),
    Mutant(
        "what is sent keeps its gaps",
        "replica",
        "    return tensor.clone(memory_format=torch.contiguous_format)",
        "    return tensor",
        "test_what_is_sent_has_no_gaps",
    ),
    # ------------------------------------------------------------------ updates
    Mutant(
        "the version stays",
        "module",
        "        self.version += 1\n",
        "        pass\n",
        "test_the_last_module_is_never_late",
    ),
    Mutant(
        "all gradients count as fresh",
        "module",
        "self._situation(self.version, flight.version)",
        "self._situation(self.version, self.version)",
        "test_factors_know_the_delay_of_their_module",
    ),
    Mutant(
        "late gradients are compensated as fresh ones",
        "module",
        "staleness = self.version - flight.version",
        "staleness = 0",
        "test_compensation_uses_the_weights",
    ),
    Mutant(
        "the mean staleness is another module's",
        "module",
        "mean = float(self._delay)",
        "mean = float(self._next_delay)",
        "test_factors_know_the_delay_of_their_module",
    ),
    Mutant(
        "compensated from the weights of now",
        "passes",
        "return now if self.replica is None else self.replica.flat",
        "return now",
        "test_compensation_uses_the_weights",
    ),
    Mutant(
        "compensation where no weights are kept",
        "passes",
        'if server.needs_past and self.delay > 0 and self.keeps != "graph-on-copy":',
        "if False:",
        "test_compensation_uses_the_weights",
    ),
    # ------------------------------------------------------------------ memory
    Mutant(
        "flights are not freed",
        "module",
        "flight = self._flights.pop(mini_batch)",
        "flight = self._flights[mini_batch]",
        "test_graphs_go_right_after",
    ),
    Mutant(
        "graphs stay until the step",
        "module",
        "        flight.outputs = flight.batch = None  # the graph goes before anything else",
        "        pass  # the graph goes before anything else",
        "test_a_graph_goes_with_its_backward_pass",
    ),
    Mutant(
        "what is replayed has a graph before",
        "passes",
        'with_graph=self.keeps != "input"',
        "with_graph=True",
        "test_a_replay_draws",
    ),
    # ------------------------------------------------------------------ saving, loading
    Mutant(
        "outputs that were sent: one too few",
        "module",
        "        ahead = self._delay - self._next_delay\n",
        "        ahead = max(0, self._delay - self._next_delay - 1)\n",
        "test_stopping_in_flight_and_going_on_changes_no_bit[fdg",
    ),
    Mutant(
        "outputs that were taken are sent again",
        "module",
        "if mini_batch < self.version + self._next_delay:",
        "if False:",
        "test_a_snapshot_holds_what_the_next_module_has_not_taken[12",
    ),
    Mutant(
        "optimizers begin anew",
        "module",
        'self.server.load(snapshot.tensors, snapshot.plain["server"])',
        "self.server.load({n: t * 0 if n.startswith('optimizer/') else t"
        ' for n, t in snapshot.tensors.items()}, snapshot.plain["server"])',
        "test_stopping_in_flight_and_going_on_changes_no_bit[bp",
    ),
    Mutant(
        "flights as old as the resume",
        "module",
        "            flight = Flight(version, num_samples, None)\n",
        "            flight = Flight(snapshot.version, num_samples, None)\n",
        "test_a_resumed_run_treats_late_gradients",
    ),
    Mutant(
        "the mean of factors begins anew",
        "module",
        "            self._factors.of([self._situation(number, max(0, number - self._delay))])\n",
        "            pass\n",
        "test_a_resumed_run_treats_late_gradients",
    ),
    Mutant(
        "the first were as late as the others",
        "module",
        "            self._factors.of([self._situation(number, max(0, number - self._delay))])\n",
        "            self._factors.of([self._situation(number, number - self._delay)])\n",
        "test_a_resumed_run_treats_late_gradients",
    ),
    Mutant(
        "the weights of flights are not taken back",
        "passes",
        "            replica.flat.copy_(past)\n",
        "            replica.flat.copy_(self._server.weights)\n",
        "test_stopping_in_flight_and_going_on_changes_no_bit[ddg-",
    ),
    Mutant(
        "kept weights follow the live ones",
        "passes",
        "            flight.weights = weights.clone()\n",
        "            flight.weights = weights\n",
        "test_stopping_in_flight_and_going_on_changes_no_bit[ddg:stash=none",
    ),
    Mutant(
        "the weights of now are lost at a resume",
        "passes",
        "            self._server.weights.copy_(now)\n",
        "            pass\n",
        "test_stopping_in_flight_and_going_on_changes_no_bit[ddg:stash=none",
    ),
    Mutant(
        "a snapshot moves on with the module",
        "module",
        't.detach().to("cpu", copy=True)',
        't.detach().to("cpu")',
        "test_looking_ahead",
    ),
    Mutant(
        "looking at a version changes the modules",
        "network",
        "self._evaluated = copy.deepcopy(self.model)",
        "self._evaluated = self.model",
        "test_looking_at_a_version",
    ),
    Mutant(
        "the state is hashed without optimizers",
        "network",
        'if name.startswith(("optimizer/", "compensation/")):',
        'if name.startswith("compensation/"):',
        "test_a_hash_of_the_state",
    ),
)


@cache
def _compiled(path: Path) -> CodeType:
    return compile(path.read_text(encoding="utf-8"), str(path), "exec")


def _load(name: str, path: Path, code: CodeType) -> ModuleType:
    spec = importlib.util.spec_from_loader(name, loader=None, origin=str(path))
    assert spec is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    exec(code, vars(module))
    return module


@contextmanager
def judges(mutant: Mutant | None) -> Iterator[dict[str, Callable[[], object]]]:
    """The tests by name, parameters included, over modules one of which is mutated.

    All real modules are back afterwards.
    """
    names = [*(f"gruppetto.decoupled.{module}" for module in MODULES), *JUDGES]
    real = {name: sys.modules.get(name) for name in names}
    try:
        for module in MODULES:
            path = SOURCE / f"{module}.py"
            code = _compiled(path)
            if mutant is not None and mutant.module == module:
                text = path.read_text(encoding="utf-8").replace(mutant.old, mutant.new)
                code = compile(text, f"<mutated {module}.py>", "exec")
            _load(f"gruppetto.decoupled.{module}", path, code)
        found: dict[str, Callable[[], object]] = {}
        for judge in JUDGES:
            path = TESTS / f"{judge}.py"
            found.update(_cases(_load(judge, path, _compiled(path))))
        yield found
    finally:
        for name, module in real.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


def _cases(module: ModuleType) -> Iterator[tuple[str, Callable[[], object]]]:
    """The tests of a module, once for each of their parameters."""
    for name, test in vars(module).items():
        if not name.startswith("test_"):
            continue
        marks = [m for m in getattr(test, "pytestmark", ()) if m.name == "parametrize"]
        columns = []
        for mark in marks:
            keys, rows = mark.args
            single = isinstance(keys, str)
            columns.append([dict([(keys, r)] if single else zip(keys, r)) for r in rows])  # noqa: B905
        for chosen in itertools.product(*columns):
            given = {key: value for part in chosen for key, value in part.items()}
            shown = f"{name}[{'-'.join(map(str, given.values()))}]" if given else name
            yield shown, lambda test=test, given=given: test(**given)


def verdict(mutant: Mutant | None, only: Collection[str] = ()) -> str | None:
    """Which test notices a mistake first, and how; None when none does.

    Args:
        only: beginnings of the names of tests to ask; of each the first case. All, if empty, the
            one that the mutant names before the others.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with judges(mutant) as tests:
            if only:
                asked = [next(name for name in tests if name.startswith(by)) for by in sorted(only)]
            else:
                known = mutant.by if mutant is not None else ""
                asked = sorted(tests, key=lambda name: not name.startswith(known))
            for name in asked:
                try:
                    tests[name]()
                except BaseException as error:  # pytest.raises fails with one
                    if isinstance(error, KeyboardInterrupt):
                        raise
                    said = str(error).strip().splitlines() or [""]
                    return f"{name}: {type(error).__name__}: {said[0]}"
    finally:
        torch.set_num_threads(before)
    return None


def main() -> int:
    print(f"| {'mutant':52} | {'file':8} | killed by |")
    print(f"|{'-' * 54}|{'-' * 10}|-----------|")
    alive = 0
    for mutant in MUTANTS:
        by = verdict(mutant)
        alive += by is None
        print(f"| {mutant.name:52} | {mutant.module:8} | {(by or 'NOTHING')[:120]} |", flush=True)
    print(f"\n{len(MUTANTS) - alive} of {len(MUTANTS)} killed; the real thing: {verdict(None)}")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())

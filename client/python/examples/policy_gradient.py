"""Policy gradient: rollout processes follow the weights of a trainer, and may die at any time.

python policy_gradient.py [--steps N] [--rollouts N] [--kill-every SECONDS] [--compare]

A small transformer reads digits and learns to write them in order, only from rewards. The trainer
shards its state with ZeroShard. Each rollout process keeps a bfloat16 copy of the model at the
newest version, samples answers with it, and sends them to the trainer. Every five seconds one of
them is killed, and another one takes its place. With --compare, the same training runs without
deaths before, and a chart shows both rewards.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import pickle
import secrets
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.torch import follow, group_sharded_parallel

NAME = "policy-gradient"  # the run, which the rollout processes follow
DIGITS, LENGTH = 10, 6  # a prompt has six digits from 0 to 9, and so has an answer
WIDTH, HEADS, LAYERS = 128, 4, 4
PROMPTS, SAMPLES = 16, 8  # each message has eight answers to each of 16 prompts
CLIP = 0.2  # PPO's bound for the ratio of new and old probabilities


class Policy(nn.Module):
    """A transformer that returns the logits of each next digit of an answer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(DIGITS + 1, WIDTH)  # the last one ends the prompt
        self.positions = nn.Embedding(2 * LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, DIGITS)

    def forward(self, prompts: Tensor, answers: Tensor) -> Tensor:
        end = torch.full_like(prompts[:, :1], DIGITS)
        x = self.tokens(torch.cat([prompts, end, answers], 1))
        x = x + self.positions.weight[: x.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        x = self.blocks(x, mask=mask, is_causal=True)
        logits: Tensor = self.head(self.norm(x[:, prompts.shape[1] :]))
        return logits.float()


@dataclass
class Received:
    """A version that a rollout process has received, and the seconds that applying it took."""

    version: int
    bytes: int
    copied: str | None
    pause: float


@dataclass
class Samples:
    """Answers to prompts, with the log-probability and the reward of each digit."""

    prompts: Tensor
    answers: Tensor
    log_probs: Tensor
    rewards: Tensor


@torch.no_grad()
def sample(policy: nn.Module) -> Samples:
    """Answers random prompts. A digit's reward is 1 if it is the right one at its position."""
    prompts = torch.randint(DIGITS, (PROMPTS, LENGTH)).repeat_interleave(SAMPLES, 0)
    answers, log_probs = prompts[:, :0], torch.empty(len(prompts), 0)
    for _ in range(LENGTH):
        choices = policy(prompts, answers)[:, -1].log_softmax(-1)
        digits = choices.exp().multinomial(1)
        answers = torch.cat([answers, digits], 1)
        log_probs = torch.cat([log_probs, choices.gather(1, digits)], 1)
    rewards = (answers == prompts.sort(1).values).float()
    return Samples(prompts, answers, log_probs, rewards)


def roll_out(trainer: Connection, address: str) -> None:
    """Runs a rollout process: follows the trainer, and sends it answers from each version."""
    torch.set_num_threads(1)
    torch.seed()  # otherwise each process would draw the same prompts
    policy = Policy().bfloat16().eval()
    with follow(NAME, dtype=torch.bfloat16, address=address) as versions:
        for version in versions:
            began = time.perf_counter()
            version.apply(policy)
            pause = time.perf_counter() - began
            received = Received(version.number, version.bytes, version.copied, pause)
            # Connection.send would leave the tensors in memory that this process shares until
            # the trainer has read them. If it is killed before, they are lost.
            trainer.send_bytes(pickle.dumps((received, sample(policy))))
            trainer.recv_bytes()  # the trainer has them; more would grow old in the pipe


@dataclass
class Rollout:
    """A rollout process and those that have replaced it, with what they have received."""

    process: BaseProcess
    connection: Connection
    processes: int = 1
    received: list[Received] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    #: The seconds from the start of each new process to its first answers.
    gaps: list[float] = field(default_factory=list)
    began: float | None = None

    def add(self, received: Received, newest: int) -> None:
        """Notes what has arrived while the trainer had the version ``newest``."""
        self.received.append(received)
        self.lags.append(newest - received.version)
        if self.began is not None:
            self.gaps.append(time.monotonic() - self.began)
            self.began = None


class Fleet:
    """The rollout processes. One of them is killed every ``kill_every`` seconds, if that is not
    zero. Each that ends is replaced."""

    def __init__(self, count: int, address: str, kill_every: float) -> None:
        # Each process begins as a copy of one that has already imported torch.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "zeroshard.torch"])
        self._address, self._kill_every = address, kill_every
        self.rollouts = [Rollout(*self._start()) for _ in range(count)]
        self.deaths, self._next_kill = 0, time.monotonic() + kill_every

    def _start(self) -> tuple[BaseProcess, Connection]:
        # Each process has a pipe of its own. A queue would have a lock, which a process that is
        # killed while it writes never releases.
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=roll_out, args=(theirs, self._address), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def receive(self) -> Iterator[tuple[Rollout, Received, Samples]]:
        """Yields answers as they arrive from any of the processes."""
        while True:
            self._kill_one()
            ready = wait([rollout.connection for rollout in self.rollouts], timeout=0.1)
            for rollout in [rollout for rollout in self.rollouts if rollout.connection in ready]:
                try:
                    message = rollout.connection.recv_bytes()
                    rollout.connection.send_bytes(b"")
                except (EOFError, OSError):  # it has ended, perhaps within a message
                    self._replace(rollout)
                else:
                    yield rollout, *pickle.loads(message)

    def _replace(self, rollout: Rollout) -> None:
        rollout.process.join()
        if rollout.process.exitcode != -signal.SIGKILL:
            raise SystemExit("a rollout process has failed; its error is above")
        rollout.began = time.monotonic()
        rollout.process, rollout.connection = self._start()
        rollout.processes += 1

    def _kill_one(self) -> None:
        if self._kill_every and time.monotonic() > self._next_kill:
            self.rollouts[self.deaths % len(self.rollouts)].process.kill()
            self.deaths += 1
            self._next_kill += self._kill_every

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for rollout in self.rollouts:
            rollout.process.kill()
            rollout.process.join()


def learn(policy: nn.Module, optimizer: torch.optim.Optimizer, samples: Samples) -> None:
    """Makes a step of policy gradient. The ratio of probabilities corrects that the answers come
    from an earlier version, rounded to bfloat16."""
    groups = samples.rewards.view(PROMPTS, SAMPLES, LENGTH)
    advantages = (groups - groups.mean(1, keepdim=True)).view_as(samples.rewards)
    choices = policy(samples.prompts, samples.answers[:, :-1]).log_softmax(-1)
    log_probs = choices.gather(2, samples.answers.unsqueeze(2)).squeeze(2)
    ratio = (log_probs - samples.log_probs).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    loss = -torch.min(ratio * advantages, clipped * advantages).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
    optimizer.step()


def train(steps: int, count: int, kill_every: float) -> list[float]:
    """Trains, and prints the table of the rollout processes. Returns the reward of each step."""
    torch.manual_seed(0)
    model: nn.Module = Policy()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    rewards: list[float] = []
    with zs.init(name=NAME, shards=2) as session:
        model, optimizer, _ = group_sharded_parallel(model, optimizer, "os_g")
        with Fleet(count, session.address, kill_every) as fleet:
            began = time.monotonic()
            for rollout, received, samples in fleet.receive():
                rollout.add(received, newest=len(rewards))
                learn(model, optimizer, samples)
                rewards.append(samples.rewards.mean().item())
                if len(rewards) % 20 == 0:
                    print(
                        f"step {len(rewards):4}   reward {mean(rewards[-20:]):.3f}   "
                        f"version {received.version:4}   lag {rollout.lags[-1]}   "
                        f"killed {fleet.deaths}",
                        flush=True,
                    )
                if len(rewards) == steps:
                    break
            seconds = time.monotonic() - began
    print(f"{steps} steps in {seconds:.0f} s, {fleet.deaths} rollout processes killed")
    print_table(fleet.rollouts)
    return rewards


def mean(values: Sequence[float]) -> float:
    """The mean of the values, or not a number if there are none."""
    return statistics.fmean(values) if values else math.nan


def print_table(rollouts: Sequence[Rollout]) -> None:
    """Prints what the rollout processes have received, and the cost of it.

    A version's changes have a mean size, as a part of a full copy. The lag is the number of steps
    that the trainer had made since the version when it used the answers. The pause is the time in
    ``apply``, without full copies. The gap is the mean time from the start of a new process to its
    first answers.
    """
    full = max(of.bytes for rollout in rollouts for of in rollout.received if of.copied)
    titles = "rollout, processes, versions, copies, MiB, bytes/copy, lag, max, pause ms, max, gap s"
    rows = [titles.split(", ")]
    for number, rollout in enumerate(rollouts):
        changes = [of for of in rollout.received if not of.copied]
        pauses = [1000 * of.pause for of in changes]
        copies = len(rollout.received) - len(changes)
        mib = sum(of.bytes for of in rollout.received) / 2**20
        rows.append(
            f"{number} {rollout.processes} {len(rollout.received)} {copies} {mib:.1f} "
            f"{mean([of.bytes / full for of in changes]):.1%} "
            f"{mean(rollout.lags):.1f} {max(rollout.lags, default=0)} "
            f"{mean(pauses):.1f} {max(pauses, default=math.nan):.1f} "
            f"{mean(rollout.gaps):.1f}".split()
        )
    for row in rows:
        print("  ".join(text.rjust(len(title)) for text, title in zip(row, rows[0], strict=True)))


def print_chart(curves: dict[str, list[float]], columns: int = 72, rows: int = 11) -> None:
    """Prints the rewards of two runs, "o" and "x", or "*" where both are the same."""
    cells = [[" "] * columns for _ in range(rows)]
    for mark, rewards in zip("ox", curves.values(), strict=False):
        for column in range(columns):
            # The mean of the steps that belong to the column.
            begin, end = (len(rewards) * edge // columns for edge in (column, column + 1))
            row = cells[round((1 - mean(rewards[begin : max(end, begin + 1)])) * (rows - 1))]
            row[column] = mark if row[column] == " " else "*"
    names = [f"{mark} {name}" for mark, name in zip("ox", curves, strict=False)]
    print(f"\nreward   {', '.join(names)}")
    for number, row in enumerate(cells):
        print(f"{1 - number / (rows - 1):6.2f} |{''.join(row).rstrip()}")
    print(f"{'step':>6} 0{len(max(curves.values(), key=len)):>{columns}}")


def main() -> None:
    """Trains, and prints what became of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rollouts", type=int, default=4, help="the number of processes")
    parser.add_argument("--kill-every", type=float, default=5.0, metavar="SECONDS", help="0: never")
    parser.add_argument(
        "--compare", action="store_true", help="train without deaths first, and show both rewards"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # The servers and the rollout processes are on this machine, unless ZEROSHARD_ADDRESS is set.
    if "ZEROSHARD_ADDRESS" not in os.environ:
        os.environ["ZEROSHARD_TOKEN"] = secrets.token_hex(16)

    curves: dict[str, list[float]] = {}
    runs = {0.0, arguments.kill_every} if arguments.compare else {arguments.kill_every}
    for kill_every in sorted(runs):
        name = f"one killed every {kill_every:g} s" if kill_every else "undisturbed"
        print(f"\n{arguments.rollouts} rollout processes, {name}")
        curves[name] = train(arguments.steps, arguments.rollouts, kill_every)
    if arguments.compare:
        print_chart(curves)


if __name__ == "__main__":
    main()

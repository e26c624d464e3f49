"""The requests of a comparison: the same token ids for every server.

Groups are sent one after the other, and the prefix cache is emptied before each. Two groups may have the same prompts
in different batches; they show how much a server differs from itself (`SAME`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from nsa_plugin.tools.serving.engine import CompareError
from nsa_plugin.tools.serving.requests import TOP, PromptRequest, RequestGroup

SINGLE, BATCH, PREFIX, CONCURRENT, FORCED = "single", "batch", "prefix", "concurrent", "forced"
ROWS, LIMIT = "rows", "limit"
INTERLEAVED, MIXED_CHUNK = "interleaved", "mixed-chunk"
AGREEMENT_CASES = (SINGLE, BATCH, FORCED, ROWS, PREFIX, CONCURRENT, INTERLEAVED, MIXED_CHUNK)

# Pairs of groups with the same prompts: alone twice, alone and in one batch (whose chunks have other sizes), with and
# without a prefix cache hit, and concurrently in another order; short and long prompts in turn, alone and in one batch.
SAME = (
    (SINGLE, f"{SINGLE}-again"),
    (SINGLE, BATCH),
    (FORCED, f"{FORCED}-batch"),
    (ROWS, f"{ROWS}-batch"),
    (PREFIX, f"{PREFIX}-cold"),
    (CONCURRENT, f"{CONCURRENT}-again"),
    (INTERLEAVED, f"{INTERLEAVED}-batch"),
    (MIXED_CHUNK, f"{MIXED_CHUNK}-again"),
)
NUM_CONCURRENT = 64
# `INTERLEAVED`: pairs of a long and a short prompt. A chunk of 8192 tokens has about two, so that short prompts are
# prefilled with long ones, in batches of more tokens than SGLang replays from a graph.
_PAIRS = 12
# `MIXED_CHUNK`: more prompts than a few chunks of 8192 tokens hold, so that later ones are prefilled with decode steps.
_MIXED_PROMPTS = 48
# Positions of a prompt whose log probabilities are compared: each is conditioned on the same tokens.
FORCED_POSITIONS = 512
_FIRST_TOKEN = 10


def prompt_lengths(selects_above: int, context: int, edges: Sequence[int] = ()) -> list[int]:
    """Prompt lengths in tokens: short ones, around `selects_above` and each of `edges`, and up to `context`.

    For 2048 and 32000: 32, 700, 1500, 2047, 2048, 2049, 3000, 6000, 12000, 32000.
    """
    short = [max(1, selects_above * part // 2048) for part in (32, 700, 1500)]
    long = [selects_above * 3000 // 2048, context * 3 // 16, context * 3 // 8, context]
    around = [edge + more for edge in (selects_above, *edges) for more in (-1, 0, 1)]
    lengths = {length for length in (*short, *around, *long) if length > 0}
    return sorted(length for length in lengths if length <= context)


def workload(
    vocab_size: int,
    selects_above: int,
    context: int,
    cases: Sequence[str] = AGREEMENT_CASES,
    *,
    edges: Sequence[int] = (),
    row_edges: Sequence[int] = (),
    seed: int = 7,
    concurrent: int = NUM_CONCURRENT,
) -> list[RequestGroup]:
    """The groups of `cases`, in the order in which they are sent.

    Args:
        selects_above: longest prompt in tokens that is attended to completely; see `model.selects_above`.
        context: longest prompt in tokens.
        edges: other lengths that matter, see `model.edges`.
        row_edges: lengths of the `ROWS` prompts, see `model.row_edges`; those beyond `context` are left out.

    Raises:
        CompareError: `context` allows no prompt longer than `selects_above`, or the vocabulary is too small.
    """
    if context < 2 * selects_above:
        raise CompareError(
            f"--context is {context}; the model selects from more than {selects_above} tokens, so the context needs "
            f"at least twice as many: {2 * selects_above}"
        )
    if vocab_size < 2 * _FIRST_TOKEN:
        raise CompareError(f"the vocabulary has {vocab_size} tokens; at least {2 * _FIRST_TOKEN} are needed")

    def tokens(name: str, count: int) -> tuple[int, ...]:
        return random_tokens(f"{seed}/{name}", count, vocab_size)

    groups: list[RequestGroup] = []

    def add(case: str, how: str, requests: Sequence[PromptRequest], name: str = "", top: int = TOP) -> None:
        groups.append(RequestGroup(name=name or case, case=case, how=how, requests=tuple(requests), top=top))

    lengths = prompt_lengths(selects_above, context, edges) if SINGLE in cases or BATCH in cases else []
    alone = [PromptRequest(name=f"p{count}", prompt=tokens(f"p{count}", count)) for count in lengths]
    if SINGLE in cases:
        add(SINGLE, "one by one", alone)
        add(SINGLE, "one by one", alone, f"{SINGLE}-again")
    if BATCH in cases:
        add(BATCH, "one batch", alone)
    if FORCED in cases:
        counts = sorted({selects_above * 3 // 4, selects_above * 3 // 2, min(3 * selects_above, context)})
        positions = min(FORCED_POSITIONS, counts[0] // 2)
        forced = [
            PromptRequest(
                name=f"p{count}", prompt=tokens(f"forced/{count}", count), new_tokens=1, prompt_logprobs=positions
            )
            for count in counts
        ]
        add(FORCED, "one by one", forced)
        add(FORCED, "one batch", forced, f"{FORCED}-batch")
    if ROWS in cases and (counts := sorted({count for count in row_edges if count <= context})):
        whole = [PromptRequest(name=f"q{count}", prompt=tokens(f"rows/{count}", count)) for count in counts]
        add(ROWS, "one by one", whole)
        add(ROWS, "one batch", whole, f"{ROWS}-batch")
    if PREFIX in cases:
        warm = _prefix_requests(selects_above, tokens)
        add(PREFIX, "one by one", warm)
        # The cache is emptied before each of these requests.
        cold = [replace(one, cached_tokens=0) for one in warm if one.cached_tokens]
        add(PREFIX, "one by one, uncached", cold, f"{PREFIX}-cold")
    if CONCURRENT in cases:
        source = random.Random(f"{seed}/lengths")
        low, high = math.log(max(2, selects_above // 64)), math.log(2 * selects_above)
        lengths = [int(math.exp(source.uniform(low, high))) for _ in range(concurrent)]
        mixed = [PromptRequest(name=f"c{i}", prompt=tokens(f"c{i}", count)) for i, count in enumerate(lengths)]
        add(CONCURRENT, "at once", mixed)
        source.shuffle(mixed)
        add(CONCURRENT, "at once", mixed, f"{CONCURRENT}-again")
    if INTERLEAVED in cases:
        parts = range(1, _PAIRS + 1)
        pairs = [(selects_above + selects_above * i // _PAIRS, selects_above * (2 + i) // (_PAIRS + 4)) for i in parts]
        counts = [count for pair in pairs for count in pair]
        turns = [PromptRequest(name=f"i{i}", prompt=tokens(f"i{i}", count)) for i, count in enumerate(counts)]
        add(INTERLEAVED, "one by one", turns)
        add(INTERLEAVED, "one batch", turns, f"{INTERLEAVED}-batch")
    if MIXED_CHUNK in cases:
        # SGLang mixes no request that asks for log probabilities, so the answers are scored afterwards.
        source = random.Random(f"{seed}/{MIXED_CHUNK}")
        low, high = math.log(max(2, selects_above // 16)), math.log(min(4 * selects_above, context))
        lengths = [int(math.exp(source.uniform(low, high))) for _ in range(_MIXED_PROMPTS)]
        unlogged = [PromptRequest(name=f"m{i}", prompt=tokens(f"m{i}", count)) for i, count in enumerate(lengths)]
        add(MIXED_CHUNK, "at once", unlogged, top=0)
        source.shuffle(unlogged)
        add(MIXED_CHUNK, "at once", unlogged, f"{MIXED_CHUNK}-again", top=0)
    return groups


def until_it_fails(vocab_size: int, lengths: Sequence[int], *, seed: int = 7) -> RequestGroup:
    """A prompt of each length, the shortest first. The longest ones are expected to be too much for stock."""
    requests = (
        PromptRequest(name=f"p{count}", prompt=random_tokens(f"{seed}/{LIMIT}/{count}", count, vocab_size))
        for count in sorted(set(lengths))
    )
    return RequestGroup(name=LIMIT, case=LIMIT, how="one by one", requests=tuple(requests))


def random_tokens(seed: int | str, count: int, vocab_size: int) -> tuple[int, ...]:
    """A prompt of `count` tokens."""
    # Each prompt has its own random stream: prompts stay the same when others are left out.
    source = random.Random(seed)
    return tuple(source.randrange(_FIRST_TOKEN, vocab_size) for _ in range(count))


def _prefix_requests(selects_above: int, tokens: Callable[[str, int], tuple[int, ...]]) -> list[PromptRequest]:
    """Prompts with a shared prefix, in total below and above `selects_above`: a first one, one that differs from the
    middle of it on, and one that continues it, like the next turn of a conversation.

    Engines keep a sliding window, which V4 has, only where they expect to continue: at the last whole page of a prompt.
    With MTP they also read tokens behind that page, so these prompts end within a page.
    """
    made, begun = [], selects_above * 3 // 64
    for name, shared_count, more in (
        ("below-topk", selects_above // 2, selects_above // 8 + begun),
        ("above-topk", selects_above * 3 // 2, selects_above // 4 + begun),
    ):
        shared = tokens(f"{name}/shared", shared_count)
        first = shared + tokens(f"{name}/first", more)
        made.append(PromptRequest(name=f"{name}-first", prompt=first))
        again = shared + tokens(f"{name}/again", more + 1)
        # Caches keep whole pages: half of the prefix is enough to show a hit.
        made.append(PromptRequest(name=f"{name}-again", prompt=again, cached_tokens=shared_count // 2))
        turn = first + tokens(f"{name}/turn", more // 2)
        made.append(PromptRequest(name=f"{name}-turn", prompt=turn, cached_tokens=shared_count // 2))
    return made

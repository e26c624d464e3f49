"""The toy model of the stand-ins for engines' servers, which lies beside them where they run.

Log probabilities follow from the tokens before, with a little noise that depends on the role and on the batch, as
a GPU's arithmetic has.
"""

import zlib

VOCAB, TOPK = 256, 64
NOISE = 0.02


def best(context: list[int], company: int, *, plugin: bool, wrong: bool) -> dict[int, float]:
    """The 20 most probable next tokens and their log probabilities.

    Args:
        company: prompts of the batch.
        wrong: attend to wrong tokens where there is something to select.
    """
    seed = zlib.crc32(bytes(context[-8:]) + len(context).to_bytes(2, "big") + bytes([wrong and len(context) > TOPK]))
    noise = zlib.crc32(b"%d/%d/%d" % (seed, company, plugin))
    # An odd step visits 20 of the 256 tokens, each once.
    step = seed >> 8 | 1
    values = [-1.0 - 0.5 * i + NOISE * (((noise >> i) & 15) / 7.5 - 1) for i in range(20)]
    return {(seed + step * i) % VOCAB: value for i, value in enumerate(values)}


def common(one: list[int], other: list[int]) -> int:
    """Length of the prefix that both have."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))

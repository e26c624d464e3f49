"""How many GPUs a model needs: parameters, and what the weights leave."""

from __future__ import annotations

import pytest

from ci import fits


@pytest.mark.parametrize(("model", "billions"), [("DeepSeek-V3.2", 671), ("GLM-5", 744)])
def test_the_parameters_are_those_that_the_models_are_released_with(model: str, billions: int) -> None:
    served = fits.MODELS[model]
    assert (served.routed + served.others) / 1e9 == pytest.approx(billions, rel=0.003)


def test_more_cards_leave_more_for_the_cache_and_int4_more_than_fp8() -> None:
    model = fits.MODELS["DeepSeek-V3.2"]
    # 96 GiB * 0.9 - 4 GiB less an eighth of 626 GiB.
    assert fits.tokens(model, 96, 8, "fp8") * model.token_bytes / fits.GIB == pytest.approx(4.2, abs=0.1)
    assert fits.tokens(model, 80, 8, "fp8") < 0
    counts = [fits.tokens(model, 80, cards, weights) for cards in fits.COUNTS for weights in ("fp8", "INT4 experts")]
    assert counts == sorted(counts)


def test_the_table_names_every_card_and_model() -> None:
    lines = fits.table().splitlines()[2:]
    assert len(lines) == len(fits.CARDS) * len(fits.MODELS)
    (line,) = (line for line in lines if line.startswith("| A100 80GB | DeepSeek-V3.2 |"))
    assert [cell.strip() for cell in line.split("|")[3:-1]][:3] == ["-", "524,000", "1,021,000"]

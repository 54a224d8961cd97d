"""The predicted time of a step adds up, and follows from what it should."""

from pathlib import Path

import pytest

from infoxlm_core import run_file
from infoxlm_core.model.flops import PEAKS
from infoxlm_core.systems.infoxlm import plan, step_time

CONFIGS = Path(__file__).parents[4] / "configs"


def times(name: str = "base", gpus: int = 8, gpu: str = "h200", shape: str = "long", **changes) -> dict[str, float]:
    """Milliseconds of each part."""
    config = run_file.load(CONFIGS / f"{name}.yaml").pretraining
    config = type(config).parse(config.model_dump(mode="json") | changes)
    rows = plan.plan(config, 250_002, gpus, gpu).time
    return {row.name.partition(": ")[2]: row.value for row in rows if row.name.startswith(f"{shape}: ")}


def model(**changes) -> dict:
    return {"model": {"layers": 12, "hidden": 768, "ffn": 3072, "heads": 12, **changes}}


def test_every_gpu_with_a_peak_has_the_other_rates():
    assert step_time.GPUS.keys() == PEAKS.keys()


@pytest.mark.parametrize("shape", ["long", "short"])
def test_a_step_is_the_sum_of_its_parts_and_the_run_so_many_steps(shape):
    found = times(shape=shape)
    step = found.pop("a step")

    assert step == pytest.approx(sum(found.values()))
    base = run_file.load(CONFIGS / "base.yaml").pretraining
    hours = {row.name: row.value for row in plan.plan(base, 250_002).run}
    assert hours[f"{shape} sequences"] == pytest.approx(150_000 * step / 3.6e6)


def test_products_of_base_are_the_must_do_ones_less_what_the_last_layer_leaves_out():
    tokens, d = 2048 / 8 * 1024, 768
    attention = 12 * d * 2048 / 8 * (2 * 512**2 * 12 + 128**2 * 8) + 4 * d * 2048 / 8 * 128**2 * 8
    contrast = 4 * 2048 / 8 * 131_072 * d
    rows_that_nobody_reads = 0.85 * tokens * 3 * (4 * d * d + 4 * d * 3072)
    wanted = 1.674e15 / 8 - attention - contrast - rows_that_nobody_reads

    assert times()["products"] == pytest.approx(wanted / (989e12 * step_time.PRODUCTS) * 1e3, rel=1e-3)


def test_what_is_computed_again_costs_a_third_of_products_and_a_forward_pass_of_the_rest():
    once, twice = times(), times(**model(recompute=True))

    assert 1.2 < twice["products"] / once["products"] < 4 / 3  # the head is not
    assert twice["attention"] / once["attention"] == pytest.approx(4.5 / 3.5, rel=0.01)
    assert once["layers"] < twice["layers"] < 1.4 * once["layers"] and twice["loss"] == once["loss"]


def test_shards_are_gathered_in_each_micro_batch_and_their_gradients_summed_once():
    whole, parts = times(), times(**model(sharded=True))
    table, layers, slow = 4 * 250_002 * 768, 2 * 85e6, 4 * 57e6  # about: bytes of what is gathered

    by_micro = 8 * (2 * layers + table + slow + table)
    assert parts["all-reduce"] / whole["all-reduce"] == pytest.approx((by_micro + 1.116e9) / (2 * table), rel=0.005)


def test_eight_cards_of_a_node_carry_its_share_of_the_gradients():
    gradients, spread = 4 * (278_295_186 - 768 + 768**2), {gpus: times(gpus=gpus) for gpus in (1, 8, 64)}

    assert spread[1]["all-reduce"] == spread[1]["slowest worker"] == 0
    late = 4 * 250_002 * 768 / gradients  # the word table's are ready when the backward pass ends
    assert spread[8]["all-reduce"] == pytest.approx(late * 2 * 7 / 8 * gradients / (450e9 * 0.8) * 1e3)
    assert spread[64]["all-reduce"] == pytest.approx(late * 2 * 7 / 8 * gradients / (400e9 * 0.8) * 1e3)
    assert times(gpus=56)["products"] == pytest.approx(spread[64]["products"] * 5 / 4)  # 256 shards: 4 or 5 each
    shares = [spread[gpus]["slowest worker"] / spread[gpus]["products"] for gpus in (8, 64)]
    assert shares[1] > 3 * shares[0]

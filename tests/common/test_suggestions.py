"""Names that are suggested for misspelt ones."""

from megatrain_jax._src.common.suggestions import did_you_mean


def test_a_near_name_begins_with_the_same_letter_in_any_case():
    assert "`gpus`" in did_you_mean("gpuss", ["push", "gpus"])
    assert "`RTX_4090`" in did_you_mean("rtx4090", ["RTX_4090", "RTX_5090"])
    assert not did_you_mean("gpus", ["push"])

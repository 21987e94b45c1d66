"""The generator of random calls itself; `make fuzz` makes them."""

from fuzz import Draw, offload


def test_integers_of_random_calls_have_64_bits():
    calls = [offload(Draw(78, number)) for number in range(3000)]
    stacked = [call.attributes["stacked"] for call in calls if "stacked" in call.attributes]
    assert max(stacked) == 2**63 - 1

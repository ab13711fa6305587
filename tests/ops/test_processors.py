"""A user's logits processor gets copies and cannot hide a mistake."""

import functools

import pytest
import torch

from forerun.errors import RequestError
from forerun.ops.processors import CustomProcessor


def test_two_arguments_get_output_and_logits():
    seen = []
    CustomProcessor(lambda output_ids, logits: seen.append(output_ids) or logits, prompt_ids=[7])(
        [1, 2], torch.zeros(3)
    )
    assert seen == [[1, 2]]


def test_three_arguments_get_the_prompt_first():
    seen = []

    def note(prompt_ids, output_ids, logits):
        seen.append((prompt_ids, output_ids))
        return logits

    CustomProcessor(note, prompt_ids=[7])([1], torch.zeros(3))
    assert seen == [([7], [1])]


@pytest.mark.parametrize(
    "function",
    [
        lambda output_ids, logits, scale=2.0: logits * scale,
        functools.partial(lambda scale, output_ids, logits: logits * scale, 2.0),
    ],
    ids=["default argument", "partial"],
)
def test_bound_arguments_do_not_count(function):
    assert CustomProcessor(function, prompt_ids=[])([], torch.ones(2)).tolist() == [2.0, 2.0]


def test_changing_the_arguments_in_place_changes_nothing_outside():
    output_ids, logits = [1], torch.zeros(2)

    def spoil(outputs, row):
        outputs.clear()
        return row.fill_(5.0)

    CustomProcessor(spoil, prompt_ids=[])(output_ids, logits)
    assert (output_ids, logits.tolist()) == ([1], [0.0, 0.0])


def test_a_double_row_is_reserved_as_fp32():
    assert CustomProcessor(lambda o, logits: logits.double(), prompt_ids=[])([], torch.zeros(2)).dtype == torch.float32


def broken(returned):
    def processor(output_ids, logits):
        return returned

    return processor


@pytest.mark.parametrize(
    ("returned", "complaint"),
    [
        (None, "returned NoneType"),
        ([0.0, 0.0], "returned list"),
        (torch.zeros(3), r"shape \[3\]"),
        (torch.zeros(1, 2), r"shape \[1, 2\]"),
        (torch.tensor([0.0, float("nan")]), "NaN or"),
        (torch.tensor([0.0, float("inf")]), "NaN or"),
    ],
)
def test_a_wrong_return_is_an_error_naming_the_processor(returned, complaint):
    with pytest.raises(RequestError, match=f"broken.<locals>.processor.*{complaint}"):
        CustomProcessor(broken(returned), prompt_ids=[])([], torch.zeros(2))


def test_an_exception_is_an_error_naming_the_processor():
    class Failing:
        def __call__(self, output_ids, logits):
            raise KeyError("gone")

    with pytest.raises(RequestError, match="Failing raised KeyError: 'gone'"):
        CustomProcessor(Failing(), prompt_ids=[])([], torch.zeros(2))


@pytest.mark.parametrize("function", [lambda logits: logits, lambda *args: args[-1], lambda a, b, c, d: d])
def test_a_wrong_number_of_arguments_is_refused_at_once(function):
    with pytest.raises(RequestError, match="must take"):
        CustomProcessor(function, prompt_ids=[])

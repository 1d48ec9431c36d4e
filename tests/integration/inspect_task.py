"""A task for inspect-ai with its dataset in the file: run by test_evals.py in inspect's interpreter."""

from inspect_ai import Task, task  # pyright: ignore[reportMissingImports]
from inspect_ai.dataset import Sample  # pyright: ignore[reportMissingImports]
from inspect_ai.scorer import includes  # pyright: ignore[reportMissingImports]
from inspect_ai.solver import generate  # pyright: ignore[reportMissingImports]


@task
def capitals() -> Task:
    """Two questions that a small model answers."""
    return Task(
        dataset=[
            Sample(input="What is the capital of France? Answer in one sentence.", target="Paris"),
            Sample(input="What is the capital of Italy? Answer in one sentence.", target="Rome"),
        ],
        solver=generate(max_tokens=32, temperature=0.0),
        scorer=includes(),
    )

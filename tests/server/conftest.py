"""Two servers for the whole test process: one that drafts nothing, one whose drafter knows (nearly) all answers."""

from __future__ import annotations

import pytest

from tests.server.served import CHAT, PROMPT, chat_ids, chat_llm, knows_all, served


@pytest.fixture(scope="session")
def plain():
    with served(chat_llm(), enable_tokenizer_info_endpoint=True) as server:
        yield server


@pytest.fixture(scope="session")
def drafting():
    config = knows_all(PROMPT, chat_ids(CHAT))
    with served(chat_llm(config), per_request_spec_decode_metrics="detailed") as server:
        yield server


@pytest.fixture(params=["plain", "drafting"])
def either(request):
    return request.getfixturevalue(request.param)

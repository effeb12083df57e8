import sys
import warnings

import pytest
from transformers.utils import logging

from firesteel.cli.host import has_tokenizer, quiet_host, require_host
from firesteel.errors import UnsupportedError
from tests.cli.command import write_tokenizer


def test_quiet_host_gives_back_what_it_changed():
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    with quiet_host():
        assert logging.get_verbosity() == logging.ERROR
        assert not logging.is_progress_bar_enabled()
        warnings.warn("nobody hears this", UserWarning, stacklevel=1)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_quiet_host_leaves_a_terminal_alone(monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with quiet_host(), pytest.warns(UserWarning, match="heard"):
        warnings.warn("heard", UserWarning, stacklevel=1)


def test_the_host_must_be_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnsupportedError, match=r"firesteel\[transformers\]"):
        require_host()


def test_a_folder_has_a_tokenizer_or_not(tmp_path):
    assert not has_tokenizer(tmp_path)
    write_tokenizer(tmp_path)
    assert has_tokenizer(tmp_path)

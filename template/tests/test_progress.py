"""What is printed may be lost; the run goes on."""

import io
import os

from curry_train.tracking.progress import tell


def test_a_narrow_encoding_shows_what_it_cannot_write():
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding="ascii")
    tell("sample: \ufffd\U0001f680 \udc80", stream)
    assert written.getvalue() == b"sample: \\ufffd\\U0001f680 \\udc80\n"


def test_a_reader_that_is_gone_costs_the_text_alone():
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stream:
        tell("one", stream)
        tell("two", stream)

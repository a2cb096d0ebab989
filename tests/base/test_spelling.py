"""Plain text: nothing in it acts where it is printed."""

from stages.base.spelling import flat, spelled_out


def test_no_character_that_acts_on_a_terminal_comes_through():
    acting = "".join(map(chr, [*range(32), *range(127, 160)]))
    acting += "\u200b\u200f\u2028\u2029\u202e\u2066\ufeff\ud800\ue000\U000e0041"
    shown = spelled_out(acting)
    assert shown.isprintable() and len(shown) > len(acting)
    assert spelled_out("a\x1b[2J\x1b]0;title\x07b") == "a\\x1b[2J\\x1b]0;title\\x07b"
    assert spelled_out("\u202eabc\n\t") == "\\u202eabc\\n\\t"


def test_plain_text_of_any_script_stays_as_it_is():
    text = "naïve 漢字 🙂 [bold]not markup[/bold] \\ <b>"
    assert spelled_out(text) == text
    assert spelled_out("a\u00a0b\u3000c") == "a b c"
    assert spelled_out("a\n\tb\r\x00", keep="\n\t") == "a\n\tb\\r\\x00"


def test_nested_values_go_by_dotted_keys_in_their_order():
    values = {"b": {"2": {"x": 1}, "1": None}, "a": {}, "c": [{"d": 1}]}
    found = {"b.2.x": 1, "b.1": None, "a": {}, "c": [{"d": 1}]}
    assert list(flat(values).items()) == list(found.items())

"""Captions as the training data of PixArt and its kin were cleaned: lower case, without markup, addresses and marks."""

import html
import re
import unicodedata
from urllib.parse import unquote_plus

_PICTURE_FILES = "png|jpe?g|gif|bmp|webp|tiff?|eps|pdf|mp4"
_DOMAINS = "com|co|org|net|edu|ru|gov|io"
_COMBINED = re.compile("[-_]")

# Applied in this order to text in lower case.
_RULES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"<person>", "person"),
        (r"</?[a-z][^<>]*>", ""),  # tags
        (rf"\b(?:https?://|www\.)\S+|\b[\w.-]+\.(?:{_DOMAINS})\b(?:/\S*)?", ""),  # addresses
        (r"[\w.]*@[\w.-]+", ""),  # mail and handles
        (r"[`´«»“”„¨]|&quot;?", '"'),
        (r"[‘’‚]", "'"),
        (r"[\u2010-\u2015\u2e3a\u2e3b]", "-"),
        (r"\b\d{1,3}(?:\.\d{1,3}){3}\b", ""),  # addresses of computers
        (rf"\S+\.(?:{_PICTURE_FILES})\b", ""),
        (r"\b\d{3,}\s*[x×х]\s*\d{3,}\b", ""),  # sizes of pictures, with the letter of two alphabets
        (r"#\d+\b|\b\d{6,}\b", ""),  # numbers of pictures
        (r"[#®•©™&@·º½¾¿¡§~()\[\]{}|\\/*]+|\.{2,}|\s\.(?=\s)", " "),
        (r"[\"']{2,}", '"'),
        (r"-{2,}", "-"),
        (r"\s:\s", ": "),
        (r"(?<=\D),(?=\S)", ", "),
        (r"(?<=\D)\.(?=\w)|(?<=\w)\.(?=[^\W\d])", ". "),
        (r"\s+", " "),
        (r"^\s*[\"'](.*)[\"']\s*$", r"\1"),
        (r"^[\s'_,:;-]+|[\s'_,:+-]+$", ""),
    )
]


def clean_caption(text: str) -> str:
    """A prompt in the form of the captions that the model was trained on.

    Entities, percent signs of addresses and ligatures are resolved; tags, web addresses, handles, names and sizes of
    picture files go; quotes and dashes become plain; more than three hyphens or underscores become spaces. Nothing that
    may say what to draw is taken out: letters of all scripts stay, and words that mix letters and digits.
    """
    text = html.unescape(html.unescape(unquote_plus(text)))
    text = "".join(_plain(letter) for letter in unicodedata.normalize("NFC", text)).lower().strip()
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    if len(_COMBINED.findall(text)) > 3:
        text = " ".join(_COMBINED.sub(" ", text).split())
    return text


def lower_caption(text: str) -> str:
    """The least that these models want: lower case, without space around."""
    return text.lower().strip()


def _plain(letter: str) -> str:
    """The letters of a ligature, and letters of full width in theirs; all others as they are."""
    return unicodedata.normalize("NFKC", letter) if "\ufb00" <= letter <= "\ufb06" or "！" <= letter <= "～" else letter

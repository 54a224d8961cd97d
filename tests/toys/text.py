"""Generate small translated catalogs with enough structure to learn from."""

import itertools
import random
from pathlib import Path

import polib

VERBS = {"Open": ("Öffne", "Ouvrez"), "Delete": ("Lösche", "Supprimez"), "Save": ("Speichere", "Enregistrez"),
         "Show": ("Zeige", "Affichez"), "Rename": ("Benenne", "Renommez"), "Print": ("Drucke", "Imprimez")}  # fmt: skip
SIZES = {"new": ("neue", "nouvelle"), "old": ("alte", "ancienne"), "large": ("große", "grande"),
         "small": ("kleine", "petite"), "hidden": ("versteckte", "cachée"),
         "public": ("öffentliche", "publique")}  # fmt: skip
NOUNS = {"page": ("Seite", "page"), "table": ("Tabelle", "table"), "list": ("Liste", "liste"),
         "message": ("Nachricht", "dépêche"), "group": ("Gruppe", "équipe"), "file": ("Datei", "fiche"),
         "card": ("Karte", "carte"), "key": ("Taste", "touche")}  # fmt: skip
PLACES = {"archive": ("Ablage", "réserve"), "library": ("Bücherei", "bibliothèque"), "window": ("Ansicht", "fenêtre"),
          "history": ("Chronik", "mémoire"), "network": ("Leitung", "ligne")}  # fmt: skip


def messages(language: int) -> list[tuple[str, str]]:
    """Return all (English, translation) messages; language 0 is German, 1 is French."""
    words = ("der", "aus") if language == 0 else ("la", "de")
    return [
        (
            f"{verb} the {size} {noun} of the {place} now",
            f"{VERBS[verb][language]} {words[0]} {SIZES[size][language]} {NOUNS[noun][language]} {words[1]} "
            f"{words[0]} {PLACES[place][language]}",
        )
        for verb, size, noun, place in itertools.product(VERBS, SIZES, NOUNS, PLACES)
    ]


def write_catalogs(directory: Path, corpora: dict[str, int]) -> Path:
    """Write directory/CORPUS/locale/LANGUAGE/LC_MESSAGES/django.po; no message is in two corpora."""
    order = list(range(len(messages(0))))
    random.Random(5).shuffle(order)
    for corpus, count in corpora.items():
        chosen = order[:count]
        order = order[count:]
        for number, language in enumerate(("de", "fr")):
            catalog = polib.POFile()
            catalog.metadata = {"Content-Type": "text/plain; charset=utf-8", "Language": language}
            pairs = messages(number)
            catalog.extend(polib.POEntry(msgid=pairs[i][0], msgstr=pairs[i][1]) for i in chosen)
            path = directory / corpus / "locale" / language / "LC_MESSAGES" / "django.po"
            path.parent.mkdir(parents=True)
            catalog.save(str(path))
    return directory

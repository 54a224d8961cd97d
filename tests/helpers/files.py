"""Intermediate files of a preparation in a folder, without the wait for the disk that a power cut demands."""

from components.adapters.directory import Directory


class Folder(Directory):
    """A storage whose files appear at once, but may be lost in a power cut."""

    def put(self, name: str, content: str | bytes) -> None:
        path = self._path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary_path = path.with_name(f".{path.name}.tmp")
        temporary_path.write_bytes(content.encode() if isinstance(content, str) else content)
        temporary_path.replace(path)

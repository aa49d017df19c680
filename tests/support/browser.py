"""Opens a report in a browser, and collects the errors of the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

Theme = Literal["light", "dark"]


class OpenedPage:
    """A page of playwright that shows a file.

    Attributes:
        page: of playwright.
        faults: errors of scripts, messages on the console, dialogs, and requests for anything but the file.
    """

    def __init__(self, page: Any, file: Path, scripts: bool = True) -> None:
        self.page = page
        self.faults: list[str] = []
        page.on("console", lambda message: self.faults.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        page.on("dialog", self._dialog)
        page.on("request", lambda request: self._request(request.url, file.as_uri()))
        page.goto(file.as_uri())
        if scripts:
            page.wait_for_selector("html[data-ready=true]")

    def texts(self, selector: str) -> list[str]:
        """Return the text of each element that is shown."""
        return [each.inner_text() for each in self.page.locator(selector).all() if each.is_visible()]

    def _dialog(self, dialog: Any) -> None:
        self.faults.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _request(self, url: str, own: str) -> None:
        if url.partition("#")[0] != own and not url.startswith("data:"):
            self.faults.append(f"request: {url}")

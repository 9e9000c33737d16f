"""Opens reports in Chromium: nothing overflows, timelines zoom, and the console stays silent.

usage: browser_test.py REPORT_FIXTURE [REPORT_FOLDER ...]

REPORT_FIXTURE writes the report that is tested; folders that are named are tested too. Exits with 77 where
there is no Chromium.
"""

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

FIXTURE, FOLDERS = "", []  # set by main
DEADLINE_S = 60


def find_chromium():
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if shutil.which(name):
            return shutil.which(name)
    return None


class Browser:
    """A headless Chromium with one page. Commands and events are JSON between zero bytes, over two pipes."""

    def __init__(self, program, profile):
        commands_in, self.commands = os.pipe()
        self.events, events_out = os.pipe()

        def connect():  # Chromium reads from descriptor 3 and writes to 4
            reading, writing = os.dup(commands_in), os.dup(events_out)
            os.dup2(reading, 3)
            os.dup2(writing, 4)

        self.process = subprocess.Popen(
            [program, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe",
             f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=connect, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(commands_in)
        os.close(events_out)
        self.received, self.waiting, self.count, self.session = b"", [], 0, None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "DOM"):
            self.send(domain + ".enable")

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.commands)
        os.close(self.events)

    def next_message(self):
        deadline = time.monotonic() + DEADLINE_S
        while b"\0" not in self.received:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.events], [], [], left)[0]:
                raise TimeoutError(f"Chromium was silent for {DEADLINE_S} s")
            piece = os.read(self.events, 1 << 16)
            if not piece:
                raise EOFError("Chromium ended")
            self.received += piece
        message, self.received = self.received.split(b"\0", 1)
        return json.loads(message)

    def send(self, method, **params):
        self.count += 1
        command = {"id": self.count, "method": method, "params": params}
        if self.session:
            command["sessionId"] = self.session
        os.write(self.commands, json.dumps(command).encode() + b"\0")
        while True:
            message = self.next_message()
            if message.get("id") == self.count:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]
            self.waiting.append(message)

    def wait_for(self, event):
        while True:
            for index, message in enumerate(self.waiting):
                if message.get("method") == event:
                    return self.waiting.pop(index)
            self.waiting.append(self.next_message())

    def open(self, path, width, scheme="light", media="screen"):
        self.waiting.clear()
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600)
        self.send("Emulation.setEmulatedMedia", media=media, features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.send("Page.navigate", url="file://" + path)
        self.wait_for("Page.loadEventFired")

    def evaluate(self, expression):
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def complaints(self):
        """Errors that the page wrote to the console."""
        self.evaluate("0")  # what came before is here by then
        found = []
        for message in self.waiting:
            params = message.get("params", {})
            if message.get("method") == "Runtime.exceptionThrown":
                found.append(params["exceptionDetails"])
            if message.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"])
            if message.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
                found.append(params["args"])
        return found


# What leaves the page, or is cut off inside of it. Tables, listings and static timelines may scroll in their own
# box on a phone; at 1280 pixels only listings may.
OVERFLOW = """(() => {
  const width = document.documentElement.clientWidth, found = [];
  const name = element => element.tagName + "." + element.className + " " + element.textContent.trim().slice(0, 40);
  if (document.documentElement.scrollWidth > width) found.push("the page is " + document.documentElement.scrollWidth);
  for (const text of document.querySelectorAll("figcaption, caption, p")) {
    if (text.closest(".scroll")) found.push("scrolls away with its table: " + name(text));
  }
  for (const element of document.querySelectorAll("body *")) {
    if (element.closest("svg, script") || !element.getClientRects().length) continue;
    const scrolls = element.parentElement.closest(width > 1000 ? ".listing" : ".scroll, .listing");
    if (scrolls) continue;
    const box = element.getBoundingClientRect();
    if (box.right > width + 1 || box.left < -1) found.push("leaves the page: " + name(element));
    const may_scroll = element.matches(width > 1000 ? ".listing" : ".scroll, .listing");
    if (!may_scroll && element.scrollWidth > element.clientWidth + 1 && element.clientWidth > 0)
      found.push("is cut off: " + name(element));
  }
  return found;
})()"""

RANGE = """(() => { const data = document.querySelectorAll(".viewer")[%d].dataset;
  return [Number(data.from), Number(data.to)]; })()"""


class Reports(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        made = os.path.join(cls.folder.name, "report")
        subprocess.run([FIXTURE, made], check=True, timeout=60)
        cls.fixture = os.path.join(made, "report.html")
        cls.pages = [cls.fixture] + [os.path.join(os.path.abspath(folder), "report.html") for folder in FOLDERS]
        cls.browser = Browser(find_chromium(), os.path.join(cls.folder.name, "profile"))

    @classmethod
    def tearDownClass(cls):
        cls.browser.close()
        cls.folder.cleanup()

    def length(self, index=0):
        begin, end = self.browser.evaluate(RANGE % index)
        return end - begin

    def test_nothing_overflows(self):
        for page in self.pages:
            for width in (1280, 390):
                for scheme in ("light", "dark"):
                    with self.subTest(page=page, width=width, scheme=scheme):
                        self.browser.open(page, width, scheme)
                        self.assertEqual(self.browser.evaluate(OVERFLOW), [])
                        self.assertEqual(self.browser.complaints(), [])

    def test_schemes_differ(self):
        colours = []
        for scheme in ("light", "dark"):
            self.browser.open(self.fixture, 1280, scheme)
            colours.append(self.browser.evaluate("getComputedStyle(document.documentElement).backgroundColor"))
        self.assertNotEqual(*colours)

    def test_timelines_zoom_and_move(self):
        for page in self.pages:
            self.browser.open(page, 1280)
            for index in range(self.browser.evaluate("document.querySelectorAll('.viewer').length")):
                with self.subTest(page=page, timeline=index):
                    self.zoom_and_move(index)
            self.assertEqual(self.browser.complaints(), [])
        self.browser.open(self.fixture, 1280)
        self.assertEqual(self.browser.evaluate("document.querySelectorAll('.viewer').length"), 1)

    def zoom_and_move(self, index):
        browser = self.browser
        viewer = f"document.querySelectorAll('.viewer')[{index}]"
        whole = self.length(index)
        bars = browser.evaluate(f"{viewer}.querySelectorAll('rect.bar').length")
        self.assertGreater(bars, 0)

        press = f"{viewer}.querySelector('button[aria-label=\"%s\"]').click()"
        browser.evaluate(press % "Zoom in")
        self.assertAlmostEqual(self.length(index), whole / 2, delta=whole * 1e-6)
        before = browser.evaluate(RANGE % index)
        browser.evaluate(press % "Later")
        self.assertGreater(browser.evaluate(RANGE % index)[0], before[0])
        browser.evaluate(press % "Show everything")
        self.assertAlmostEqual(self.length(index), whole, delta=whole * 1e-6)

        browser.evaluate(f"{viewer}.querySelector('.view').focus()")
        self.key("+")
        self.assertAlmostEqual(self.length(index), whole / 2, delta=whole * 1e-6)
        self.key("n")
        self.assertIn(" to ", browser.evaluate(f"{viewer}.querySelector('output').textContent"))

        browser.evaluate(f"{viewer}.scrollIntoView({{block: 'center'}})")
        x, y = browser.evaluate(f"""(() => {{ const box = {viewer}.querySelector('.view').getBoundingClientRect();
          return [box.left + box.width * 0.6, box.top + 20]; }})()""")
        browser.send("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=-400)
        deadline = time.monotonic() + DEADLINE_S
        while self.length(index) >= whole * 0.4 and time.monotonic() < deadline:
            browser.evaluate("new Promise(requestAnimationFrame)")
        self.assertLess(self.length(index), whole * 0.4)

        browser.evaluate(press % "Show everything")
        x, y, label = browser.evaluate(f"""(() => {{
          const bar = [...{viewer}.querySelectorAll('rect.bar')].sort((a, b) => b.getBBox().width - a.getBBox().width)[0];
          const box = bar.getBoundingClientRect();
          return [box.left + box.width / 2, box.top + box.height / 2, bar.dataset.span]; }})()""")
        browser.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.assertRegex(browser.evaluate(f"{viewer}.querySelector('output').textContent"), r": .* to .*s \(.*s\)")

    def key(self, key):
        for kind in ("keyDown", "keyUp"):
            self.browser.send("Input.dispatchKeyEvent", type=kind, key=key)

    def test_print_shows_the_picture(self):
        self.browser.open(self.fixture, 1280, media="print")
        shown = "getComputedStyle(document.querySelector('%s')).display"
        self.assertEqual(self.browser.evaluate(shown % ".viewer"), "none")
        self.assertNotEqual(self.browser.evaluate(shown % "figure.timeline .static"), "none")

    def test_without_scripts_the_picture_is_there(self):
        self.browser.send("Emulation.setScriptExecutionDisabled", value=True)
        try:
            self.browser.open(self.fixture, 1280)
            root = self.browser.send("DOM.getDocument")["root"]["nodeId"]
            find = lambda selector: self.browser.send("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
            self.assertEqual(find(".viewer"), 0)
            box = self.browser.send("DOM.getBoxModel", nodeId=find("figure.timeline .static svg"))["model"]
            self.assertGreater(box["height"], 50)
        finally:
            self.browser.send("Emulation.setScriptExecutionDisabled", value=False)

    def test_everything_has_a_name(self):
        self.browser.open(self.fixture, 1280)
        nameless = self.browser.evaluate("""[...document.querySelectorAll("button, svg[role=img], [tabindex], table, a")]
          .filter(element => !(element.getAttribute("aria-label") || element.getAttribute("aria-labelledby") ||
            element.textContent.trim())).map(element => element.outerHTML.slice(0, 80))""")
        self.assertEqual(nameless, [])


def main():
    global FIXTURE, FOLDERS
    if find_chromium() is None:
        print("skipped: there is no Chromium (apt-get install chromium)")
        sys.exit(77)
    FIXTURE, FOLDERS = os.path.abspath(sys.argv[1]), sys.argv[2:]
    unittest.main(argv=sys.argv[:1], verbosity=2)


if __name__ == "__main__":
    main()

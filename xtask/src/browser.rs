//! Headless Chromium, by its DevTools protocol: <https://chromedevtools.github.io/devtools-protocol/>.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::Result;
use crate::command::succeeds;

const PROGRAMS: [&str; 4] = [
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
];
/// Maximum height of a picture.
const MAX_HEIGHT: f64 = 16_384.0;
/// Maximum time to wait for a condition, and the polling interval.
const TIMEOUT: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// A browser with one page.
pub(crate) struct Browser {
    process: Child,
    commands: ChildStdin,
    replies: BufReader<ChildStdout>,
    /// The DevTools session of the page.
    session: Option<String>,
    last_id: u64,
    /// The URLs that the page has requested.
    pub(crate) urls: Vec<String>,
    /// The errors in the console.
    pub(crate) errors: Vec<String>,
}

impl Browser {
    pub(crate) fn start() -> Result<Self> {
        let Some(program) = PROGRAMS
            .into_iter()
            .find(|program| succeeds(program, &["--version"]))
        else {
            return Err(
                "Chromium is not on the PATH: install it, on Debian by `apt-get install chromium`"
                    .to_owned(),
            );
        };
        let mut process = Command::new("sh")
            // With `--remote-debugging-pipe`, Chromium reads commands from file descriptor 3, and writes
            // replies to 4.
            .args([
                "-c",
                "exec \"$@\" 3<&0 4>&1 </dev/null >/dev/null 2>&1",
                "sh",
                program,
            ])
            .args([
                "--headless",
                "--remote-debugging-pipe",
                "--no-first-run",
                "--disable-background-networking",
            ])
            // Allow connections to this machine only.
            .arg("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE localhost, EXCLUDE 127.0.0.1")
            // The page is trusted, and containers do not support the sandbox.
            .args([
                "--no-sandbox",
                "--disable-dev-shm-usage",
                "--hide-scrollbars",
            ])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("{program}: {error}"))?;
        let (Some(commands), Some(replies)) = (process.stdin.take(), process.stdout.take()) else {
            return Err("the browser has no pipes".to_owned());
        };
        let replies = BufReader::new(replies);
        let mut browser = Self {
            process,
            commands,
            replies,
            session: None,
            last_id: 0,
            urls: vec![],
            errors: vec![],
        };
        let target = browser.call("Target.createTarget", json!({ "url": "about:blank" }))?;
        let page = json!({ "targetId": target["targetId"], "flatten": true });
        browser.session = browser.call("Target.attachToTarget", page)?["sessionId"]
            .as_str()
            .map(str::to_owned);
        for domain in ["Page", "Network", "Runtime", "Log", "Accessibility"] {
            browser.call(&format!("{domain}.enable"), json!({}))?;
        }
        Ok(browser)
    }

    pub(crate) fn open(&mut self, url: &str) -> Result {
        self.call("Page.navigate", json!({ "url": url })).map(drop)
    }

    /// Sets the width of the page, and the color scheme of the system.
    pub(crate) fn set_viewport(&mut self, (width, scheme): (u32, &str)) -> Result {
        let size =
            json!({ "width": width, "height": 900, "deviceScaleFactor": 1, "mobile": false });
        self.call("Emulation.setDeviceMetricsOverride", size)?;
        let feature = json!({ "name": "prefers-color-scheme", "value": scheme });
        self.call(
            "Emulation.setEmulatedMedia",
            json!({ "features": [feature] }),
        )
        .map(drop)
    }

    /// Returns the value of a JavaScript expression.
    pub(crate) fn evaluate(&mut self, script: &str) -> Result<Value> {
        let answer = self.call(
            "Runtime.evaluate",
            json!({ "expression": script, "returnByValue": true }),
        )?;
        match answer.get("exceptionDetails") {
            Some(details) => Err(format!("{script}: {details}")),
            None => Ok(answer["result"]["value"].clone()),
        }
    }

    /// Waits until a JavaScript expression is `true`.
    pub(crate) fn wait_until(&mut self, what: &str, script: &str) -> Result {
        for _ in 0..TIMEOUT.as_millis() / POLL_INTERVAL.as_millis() {
            if self.evaluate(script)? == true {
                return Ok(());
            }
            thread::sleep(POLL_INTERVAL);
        }
        let page = self.evaluate("document.body.innerText")?;
        Err(format!(
            "timed out waiting until {what}; the page contains:\n{page}"
        ))
    }

    /// Presses a key, such as `Tab`.
    pub(crate) fn press_key(&mut self, key: &str) -> Result {
        let (code, text) = match key {
            "Tab" => (9, ""),
            _ => (13, "\r"),
        };
        let down =
            json!({ "type": "keyDown", "key": key, "windowsVirtualKeyCode": code, "text": text });
        self.call("Input.dispatchKeyEvent", down)?;
        let up = json!({ "type": "keyUp", "key": key, "windowsVirtualKeyCode": code });
        self.call("Input.dispatchKeyEvent", up).map(drop)
    }

    /// Returns the roles and names that a screen reader uses.
    pub(crate) fn roles_and_names(&mut self) -> Result<Vec<(String, String)>> {
        let tree = self.call("Accessibility.getFullAXTree", json!({}))?;
        let nodes = tree["nodes"]
            .as_array()
            .into_iter()
            .flatten()
            .filter(|node| node["ignored"] != true);
        let text = |node: &Value, field: &str| {
            node[field]["value"].as_str().unwrap_or_default().to_owned()
        };
        Ok(nodes
            .map(|node| (text(node, "role"), text(node, "name")))
            .collect())
    }

    /// Returns a PNG of the page down to the end of the element that a selector finds, or to the largest height that Chromium
    /// draws.
    pub(crate) fn screenshot(&mut self, down_to: &str) -> Result<Vec<u8>> {
        let end = self.evaluate(&format!(
            "scrollY + document.querySelector('{down_to}').getBoundingClientRect().bottom"
        ))?;
        let width = self.evaluate("innerWidth")?;
        let height = (end.as_f64().unwrap_or_default() + 12.0).min(MAX_HEIGHT);
        let clip = json!({ "x": 0, "y": 0, "width": width, "height": height, "scale": 1 });
        let how = json!({ "format": "png", "captureBeyondViewport": true, "clip": clip });
        let picture = self.call("Page.captureScreenshot", how)?;
        STANDARD
            .decode(picture["data"].as_str().unwrap_or_default())
            .map_err(|error| error.to_string())
    }

    /// Calls a method, and records the events until its reply.
    fn call(&mut self, method: &str, params: Value) -> Result<Value> {
        self.last_id += 1;
        let mut message = json!({ "id": self.last_id, "method": method, "params": params });
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        let lost = |error| format!("the browser did not reply to {method}: {error}");
        self.commands
            .write_all(format!("{message}\0").as_bytes())
            .map_err(lost)?;
        loop {
            let mut bytes = vec![];
            self.replies.read_until(0, &mut bytes).map_err(lost)?;
            let message = bytes.strip_suffix(&[0]).ok_or("the browser has ended")?;
            let mut message: Value =
                serde_json::from_slice(message).map_err(|error| error.to_string())?;
            if message["id"] != self.last_id {
                self.record_event(&message);
            } else if let Some(error) = message.get("error") {
                return Err(format!("{method}: {error}"));
            } else {
                return Ok(message["result"].take());
            }
        }
    }

    fn record_event(&mut self, event: &Value) {
        let params = &event["params"];
        match event["method"].as_str() {
            Some("Network.requestWillBeSent") => {
                self.urls
                    .extend(params["request"]["url"].as_str().map(str::to_owned));
            }
            Some("Runtime.exceptionThrown") => {
                self.errors.push(params["exceptionDetails"].to_string())
            }
            Some("Runtime.consoleAPICalled") => self.errors.push(params["args"].to_string()),
            Some("Log.entryAdded") => self.errors.push(params["entry"].to_string()),
            _ => {}
        }
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

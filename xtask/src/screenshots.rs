//! `cargo xtask screenshots`: tests the pages of `examples/dashboard`, `examples/strategies` and of the
//! documentation in a browser, and takes their pictures.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use crate::Result;
use crate::browser::Browser;
use crate::command::{cargo, root, succeeds};
use crate::outage;
use crate::test::document;

/// Widths of the page, and color schemes.
const VIEWPORTS: [(u32, &str); 4] = [
    (1280, "light"),
    (1280, "dark"),
    (390, "light"),
    (390, "dark"),
];

/// The selector of the last element in each picture but the first, which shows the whole page.
const TIME_LINE: &str = "main > section";

pub(crate) fn screenshots() -> Result {
    let mut browser = Browser::start()?;
    check_pictures(&mut browser)?;
    check_documentation(&mut browser)?;
    let examples = ["--example", "dashboard", "--example", "strategies"];
    cargo(&[&["build", "--package", "examples"][..], &examples].concat())?;
    check_strategies(&mut browser)?;
    let example = Example::start("dashboard")?;
    let url = &example.url;

    browser.set_viewport((1200, "light"))?;
    browser.open(url)?;
    browser.wait_until(
        "decisions flow",
        &shows(
            "Redis decides",
            &in_last_records(40, "all(record.allowed) > 100"),
        ),
    )?;
    check_names(&mut browser, &["button", "textbox", "image", "table"])?;
    save_screenshot(&mut browser, "before", "body")?;

    let by_redis = "!record.local && record.allowed.redis > 100";
    let locally = "record.local === 3 && record.allowed.local > 100";
    press(&mut browser, "kill")?;
    let outage = shows(
        "Redis is stopped. The fallback decides",
        &in_last_records(12, locally),
    );
    browser.wait_until("the fallback decides", &outage)?;
    save_screenshot(&mut browser, "outage", TIME_LINE)?;

    press(&mut browser, "kill")?;
    // It came back empty.
    let overshoot = "document.getElementById('detail').textContent.endsWith('For a moment, more than the limit is allowed.')";
    browser.wait_until(
        "the page explains the overshoot",
        &shows("Redis decides again", overshoot),
    )?;
    browser.wait_until(
        "Redis decides again",
        &shows("Redis decides again", &in_last_records(14, by_redis)),
    )?;
    save_outage(&mut browser)?;
    press(&mut browser, "freeze")?;
    let outage = shows(
        "Redis is frozen. The fallback decides",
        &in_last_records(6, locally),
    );
    browser.wait_until("the fallback decides", &outage)?;
    press(&mut browser, "freeze")?;
    browser.wait_until(
        "Redis decides again",
        &shows("Redis decides again", &in_last_records(8, by_redis)),
    )?;
    browser.wait_until(
        "both outages are reconciled",
        "records.filter(record => record.reconciled).length > 1",
    )?;
    save_screenshot(&mut browser, "after", TIME_LINE)?;
    browser.set_viewport((1200, "dark"))?;
    save_screenshot(&mut browser, "dark", TIME_LINE)?;
    for viewport in VIEWPORTS {
        browser.set_viewport(viewport)?;
        check_width(&mut browser)?;
        save_page(&mut browser, "dashboard", viewport)?;
    }

    browser.evaluate("$('free-limit').value = '20/s  burst 40'")?;
    press(&mut browser, "free-limit")?;
    browser.wait_until(
        "the limit is another",
        "$('free-limit').value === '20/s burst 40'",
    )?;

    let unanswered = browser.evaluate("sum(records.map(record => record.unanswered))")?;
    if unanswered != 0 {
        return Err(format!("{unanswered} requests were not answered"));
    }
    check_requests(&mut browser, url)
}

/// Checks that the page has requested nothing elsewhere since the last check, and has no errors.
fn check_requests(browser: &mut Browser, url: &str) -> Result {
    let urls = std::mem::take(&mut browser.urls);
    let others: Vec<_> = urls
        .iter()
        .filter(|other| !other.starts_with(url) && !other.starts_with("data:"))
        .filter(|other| !other.starts_with("file:"))
        .collect();
    match others.is_empty() && browser.errors.is_empty() {
        true => Ok(()),
        false => Err(format!(
            "the page requests foreign URLs {others:?}, or has errors: {:#?}",
            browser.errors
        )),
    }
}

/// Operates the page of `examples/strategies`.
fn check_strategies(browser: &mut Browser) -> Result {
    let example = Example::start("strategies")?;
    for viewport in VIEWPORTS {
        browser.set_viewport(viewport)?;
        browser.open(&example.url)?;
        browser.wait_until(
            "nine strategies answer",
            "document.querySelectorAll('section svg').length === 9",
        )?;
        check_width(browser)?;
        save_page(browser, "strategies", viewport)?;
    }
    check_names(browser, &["image", "textbox", "combobox"])?;
    choose(browser, "quota", "10/10s burst 20")?;
    browser.wait_until(
        "windows refuse a burst, and buckets answer",
        "document.querySelectorAll('section svg').length === 4",
    )?;
    choose(browser, "quota", "ten")?;
    browser.wait_until(
        "a wrong quota gets the reason",
        "document.getElementById('problem').textContent.startsWith('\"ten\" is not a valid quota')",
    )?;
    choose(browser, "quota", "100/min")?;
    choose(browser, "pattern", "polite")?;
    browser.wait_until(
        "another pattern is shown",
        "document.querySelectorAll('section svg').length === 9 && document.getElementById('problem').textContent === ''",
    )?;
    // The browser logs each rejected quota.
    browser
        .errors
        .retain(|error| !error.contains("400 (Bad Request)"));
    check_requests(browser, &example.url)
}

/// Types or selects a value.
fn choose(browser: &mut Browser, id: &str, value: &str) -> Result {
    let script = format!(
        "(() => {{ const input = document.getElementById('{id}'); input.value = '{value}';
            input.dispatchEvent(new Event('input', {{ bubbles: true }})); }})()"
    );
    browser.evaluate(&script).map(drop)
}

/// Pages of the documentation, as rustdoc names them.
const PAGES: [&str; 5] = [
    "index",
    "guide/index",
    "guide/recipes/index",
    "guide/choosing/index",
    "enum.Strategy",
];

/// Checks pages of the documentation, and saves their pictures in `target/screenshots`.
fn check_documentation(browser: &mut Browser) -> Result {
    document(&["--package", "tower-redis-ratelimit", "--all-features"])?;
    let folder = root().join("target/doc/tower_redis_ratelimit");
    for page in PAGES {
        for viewport in VIEWPORTS {
            browser.set_viewport(viewport)?;
            browser.open(&format!("file://{}/{page}.html", folder.display()))?;
            browser.wait_until(
                "the page has its pictures",
                "document.readyState === 'complete' && [...document.images].every(image => image.naturalWidth > 0)",
            )?;
            check_width(browser)?;
            save_page(browser, &page.replace('/', "-"), viewport)?;
            if (page, viewport.0) == ("index", 1280) {
                check_fold(browser)?;
            }
        }
    }
    check_requests(browser, "file:")
}

/// Checks that the crate's page shows the claim, an outage, the promises and the links without scrolling in 900 pixels, less the
/// bar of docs.rs.
fn check_fold(browser: &mut Browser) -> Result {
    let links = "[...document.links].find(link => link.textContent === 'Production checklist')";
    let bottom = browser.evaluate(&format!("{links}.getBoundingClientRect().bottom"))?;
    match bottom.as_f64() {
        Some(bottom) if bottom <= 868.0 => Ok(()),
        _ => Err(format!("the links of README end at {bottom} of 868 pixels")),
    }
}

/// Checks the pictures of the documentation, as drawn with light and with dark colors.
fn check_pictures(browser: &mut Browser) -> Result {
    for folder in ["docs", "docs/strategies", "benches"] {
        let files =
            fs::read_dir(root().join(folder)).map_err(|error| format!("{folder}: {error}"))?;
        for file in files {
            let path = file.map_err(|error| format!("{folder}: {error}"))?.path();
            if path.extension().is_none_or(|extension| extension != "svg") {
                continue;
            }
            for scheme in ["light", "dark"] {
                browser.set_viewport((1200, scheme))?;
                browser.open(&format!("file://{}", path.display()))?;
                browser.wait_until(
                    "the picture is there",
                    "document.documentElement.localName === 'svg' && document.readyState === 'complete'",
                )?;
                let problems = browser.evaluate(PICTURE_PROBLEMS)?;
                if problems != Value::Array(vec![]) {
                    return Err(format!("{}, {scheme}: {problems}", path.display()));
                }
            }
        }
    }
    Ok(())
}

/// A JavaScript expression: the texts of a picture that are cut, cover each other, are smaller than 8 pixels on a phone (where a
/// column is 358 pixels wide), or are hardly seen.
const PICTURE_PROBLEMS: &str = "(() => {
    const picture = document.documentElement;
    const { width, height } = picture.viewBox.baseVal;
    const light = color => {
        const [r, g, b] = color.match(/[0-9.]+/g).map(n => n / 255).map(c => c > .04045 ? ((c + .055) / 1.055) ** 2.4 : c / 12.92);
        return .2126 * r + .7152 * g + .0722 * b + .05;
    };
    const paper = light(getComputedStyle(picture.querySelector('.paper')).fill);
    const texts = [...picture.querySelectorAll('text')].map(text => ({ text, box: text.getBBox() }));
    const overlap = (a, b) => a.x < b.x + b.width && b.x < a.x + a.width && a.y + 5 < b.y + b.height && b.y + 5 < a.y + a.height;
    return texts.flatMap(({ text, box }, i) => {
        const style = getComputedStyle(text);
        const color = light(style.fill);
        return [
            (box.x < 4 || box.y < 0 || box.x + box.width > width - 4 || box.y + box.height > height) && 'is cut',
            texts.slice(0, i).some(other => overlap(other.box, box)) && 'covers another',
            parseFloat(style.fontSize) * 358 / width < 8 && 'is small',
            Math.max(color, paper) / Math.min(color, paper) < 4.5 && 'is pale',
        ].filter(problem => problem).map(problem => `${text.textContent} ${problem}`);
    });
})()";

/// Returns a JavaScript condition: the page shows `state`, and `condition` holds.
fn shows(state: &str, condition: &str) -> String {
    format!("document.getElementById('state')?.textContent === '{state}' && {condition}")
}

/// Returns a JavaScript condition: `condition` holds for each of the last records.
fn in_last_records(seconds: u32, condition: &str) -> String {
    format!("records.length >= {seconds} && records.slice(-{seconds}).every(record => {condition})")
}

/// Presses a button, using only the keyboard.
fn press(browser: &mut Browser, button: &str) -> Result {
    for _ in 0..50 {
        if browser.evaluate("document.activeElement.id")? == button {
            return browser.press_key("Enter");
        }
        browser.press_key("Tab")?;
    }
    Err(format!(
        "the button {button} is not reachable with the Tab key"
    ))
}

/// Checks that all controls and images with these roles have accessible names.
fn check_names(browser: &mut Browser, wanted: &[&str]) -> Result {
    let roles = browser.roles_and_names()?;
    for role in wanted {
        let names: Vec<_> = roles
            .iter()
            .filter(|other| other.0 == *role)
            .map(|(_, name)| name)
            .collect();
        if names.is_empty() || names.iter().any(|name| name.is_empty()) {
            return Err(format!("each {role} should have a name: {names:?}"));
        }
    }
    Ok(())
}

/// Takes a picture of the page, down to the element that a selector finds.
fn save_screenshot(browser: &mut Browser, name: &str, down_to: &str) -> Result {
    // Remove the focus ring of the pressed button.
    browser.evaluate("document.activeElement.blur()")?;
    write(
        &format!("examples/dashboard/{name}.png"),
        &browser.screenshot(down_to)?,
    )
}

/// Checks that the page needs no scrolling to the right.
fn check_width(browser: &mut Browser) -> Result {
    browser.wait_until(
        "nothing needs scrolling to the right",
        "document.documentElement.scrollWidth <= innerWidth",
    )
}

/// Takes a picture of the whole page for those who change it, and no file of the repository.
fn save_page(browser: &mut Browser, name: &str, (width, scheme): (u32, &str)) -> Result {
    let folder = root().join("target/screenshots");
    fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    write(
        &format!("target/screenshots/{name}-{width}-{scheme}.png"),
        &browser.screenshot("body")?,
    )
}

/// Saves the seconds around the first outage, and their picture.
fn save_outage(browser: &mut Browser) -> Result {
    let records = browser.evaluate(outage::RECORDS)?;
    write("xtask/src/outage.json", format!("{records}\n").as_bytes())?;
    write("docs/outage.svg", outage::draw(&records).as_bytes())
}

fn write(file: &str, bytes: &[u8]) -> Result {
    fs::write(root().join(file), bytes).map_err(|error| format!("{file}: {error}"))
}

/// The process of the example.
struct Example {
    process: Child,
    url: String,
}

impl Example {
    fn start(name: &str) -> Result<Self> {
        let program = root().join("target/debug/examples").join(name);
        let mut command = Command::new(&program);
        let mut process = command
            .env("PORT", "0")
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("{}: {error}", program.display()))?;
        let lines = process
            .stdout
            .take()
            .map(BufReader::new)
            .into_iter()
            .flat_map(BufRead::lines);
        let mut words = lines.map_while(std::result::Result::ok);
        let url = words.find_map(|line| {
            line.split(' ')
                .find(|word| word.starts_with("http://"))
                .map(str::to_owned)
        });
        Ok(Self {
            process,
            url: url.ok_or("the example printed no URL: run it by hand to see why")?,
        })
    }
}

impl Drop for Example {
    fn drop(&mut self) {
        // The signal of Ctrl-C, so that it also stops its Redis.
        succeeds("kill", &["-INT", &self.process.id().to_string()]);
        let _ = self.process.wait();
    }
}

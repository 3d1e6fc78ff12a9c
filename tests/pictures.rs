//! The decisions of every strategy on equal requests, as pictures for `docs/choosing.md`: `SAVE=1 cargo test --test pictures`
//! draws them.

use std::env;
use std::error::Error;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::runtime;
use tokio::time::advance;
use tower_redis_ratelimit::check::Check;
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::strategy::{Align, Refill};
use tower_redis_ratelimit::{Key, LocalStore, Policies, Policy, Quota, Strategy};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const LIMIT: u32 = 10;
const PERIOD: i64 = 10_000;

/// The trace, in milliseconds; a window of the clock begins at 0.
const START: i64 = -1_000;
const END: i64 = 39_000;
const STEP: usize = 100;
const PHASES: [(i64, &str); 4] = [
    (3_500, "trickle"),
    (9_900, "two bursts of 15"),
    (18_500, "silence"),
    (31_500, "flood, 5 per second"),
];

/// How many requests come at a time of the trace.
fn arrivals(time: i64) -> usize {
    match time {
        -200 | 2_300 | 4_800 | 7_300 => 1,
        9_500 | 10_300 => 15,
        25_000..=38_000 if time % 200 == 0 => 1,
        _ => 0,
    }
}

#[test]
fn pictures_are_what_the_code_draws() {
    for (file, text) in pictures().unwrap() {
        let path = path(&file);
        if env::var_os("SAVE").is_some() {
            fs::write(&path, &text).unwrap();
        }
        let saved = fs::read_to_string(path).unwrap_or_default();
        assert!(
            saved == text,
            "{file} is out of date: run `SAVE=1 cargo test --test pictures`"
        );
    }
}

/// Each file of pictures, with its contents.
fn pictures() -> Result<Vec<(String, String)>> {
    let (mut files, mut inline) = (vec![], String::new());
    // These decide as `Gcra` does.
    let is_other = |strategy: &Strategy| {
        !matches!(
            strategy,
            Strategy::LeakyBucket | Strategy::TokenBucket(Refill::Greedy)
        )
    };
    for strategy in Strategy::ALL.iter().copied().filter(is_other) {
        let name = file_name(strategy);
        let picture = play(strategy)?.draw(&title(strategy));
        inline.push_str(&definition(&name, &picture));
        files.push((format!("docs/strategies/{name}.svg"), picture));
    }
    // The benches `load` and `leases` draw these, and the last one is drawn by `cargo xtask screenshots`.
    for name in ["throughput", "leases-plot", "dashboard"] {
        inline.push_str(&definition(
            name,
            &fs::read_to_string(path(&format!("docs/{name}.svg")))?,
        ));
    }
    files.push(("docs/pictures.md".to_owned(), inline));
    Ok(files)
}

/// Where a file of the repository is.
fn path(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(file)
}

/// The picture as the target of `![text][name]`. rustdoc has no folder to put it into.
fn definition(name: &str, picture: &str) -> String {
    let mut url = String::new();
    for char in picture.trim_end().chars() {
        match char {
            '\n' => url.push(' '),
            '"' | '#' | '%' | '&' | '<' | '>' => _ = write!(url, "%{:02X}", u32::from(char)),
            _ => url.push(char),
        }
    }
    format!("[{name}]: <data:image/svg+xml,{url}>\n")
}

/// The strategy in Rust's syntax.
fn title(strategy: Strategy) -> String {
    match strategy {
        Strategy::FixedWindow(Align::Clock { .. }) => "FixedWindow(Align::Clock)".to_owned(),
        Strategy::FixedWindow(align) => format!("FixedWindow(Align::{align:?})"),
        Strategy::TokenBucket(refill) => format!("TokenBucket(Refill::{refill:?})"),
        other => format!("{other:?}"),
    }
}

/// The name of the strategy, and of its parameter where that is not the usual one: `TokenBucket(Interval)` is in
/// `token_bucket_interval`.
fn file_name(strategy: Strategy) -> String {
    let name = match strategy {
        Strategy::FixedWindow(Align::Clock { .. }) => "FixedWindow".to_owned(),
        Strategy::SlidingWindow { .. } => "SlidingWindow".to_owned(),
        other => format!("{other:?}"),
    };
    let mut file = String::new();
    for c in name.chars().filter(char::is_ascii_alphabetic) {
        if c.is_ascii_uppercase() && !file.is_empty() {
            file.push('_');
        }
        file.push(c.to_ascii_lowercase());
    }
    file
}

/// The decisions of a strategy on the trace.
struct Play {
    /// When each request came, and whether it was granted.
    requests: Vec<(i64, bool)>,
    /// The remaining quota at each step.
    remaining: Vec<(i64, u32)>,
}

fn play(strategy: Strategy) -> Result<Play> {
    let runtime = runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()?;
    runtime.block_on(async {
        let store = LocalStore::default();
        let quota = Quota::per(LIMIT, millis(PERIOD));
        let ask = |check: fn(Key, &Policies, u32) -> Check, policies: &Policies| {
            store.check(check(Key::GLOBAL, policies, 1))
        };

        // The store took the time of day from the wall. The trace begins at the same place between two windows of the
        // clock whenever it is played; a charged window shows where that is.
        let clock = Policy::new("clock", Strategy::FixedWindow(Align::default()), quota)?.into();
        advance(ask(Check::take, &clock).await?.reset_after() + millis(PERIOD + START)).await;

        let policies = Policy::new("trace", strategy, quota)?.into();
        let mut play = Play {
            requests: vec![],
            remaining: vec![],
        };
        for time in (START..END).step_by(STEP) {
            for _ in 0..arrivals(time) {
                play.requests
                    .push((time, ask(Check::take, &policies).await?.is_allowed()));
            }
            play.remaining
                .push((time, ask(Check::peek, &policies).await?.remaining()));
            advance(millis(STEP as i64)).await;
        }
        Ok(play)
    })
}

fn millis(millis: i64) -> Duration {
    Duration::from_millis(millis.unsigned_abs())
}

/// The line that granted requests are stacked on and denied ones hang from.
const GROUND: f64 = 143.0;
/// The line at which nothing remains, and the height of a unit above it.
const EMPTY: f64 = 94.0;
const UNIT: f64 = 4.8;
/// From one mark of a stack to the next, and the size of a mark.
const PITCH: f64 = 3.7;
const MARK: f64 = 2.8;

const GRANTED: &str = "#0072b2";
const DENIED: &str = "#d55e00";
const HIGHLIGHT: &str = "#fff0b3";

impl Play {
    /// The largest sum of grants in a period, and the end of the first such period.
    fn most(&self) -> (usize, i64) {
        let granted = || {
            self.requests
                .iter()
                .filter(|(_, granted)| *granted)
                .map(|(time, _)| *time)
        };
        let within = |end: i64| {
            granted()
                .filter(|time| (end - PERIOD + 1..=end).contains(time))
                .count()
        };
        granted()
            .map(|end| (within(end), end))
            .max_by_key(|(most, end)| (*most, -end))
            .unwrap_or((0, START))
    }

    fn draw(&self, title: &str) -> String {
        let (most, end) = self.most();
        let caption = format!("at most {most} granted in any 10 s");
        let borders: String = (0..END).step_by(PERIOD as usize).map(border).collect();
        let phases: String = PHASES
            .iter()
            .map(|(time, name)| text(x(*time), 36.0, name))
            .collect();
        format!(
            r##"<svg xmlns="http://www.w3.org/2000/svg" width="800" height="220" viewBox="0 0 800 220" role="img"
 font-family="system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif" font-size="11" fill="#555">
<title>{title}, 10 per 10 s: {caption}</title>
<rect width="800" height="220" rx="4" fill="#fff"/>
<rect x="{band:.1}" y="42" width="{width:.1}" height="160" fill="{HIGHLIGHT}"/>
<rect x="572" y="4" width="220" height="20" rx="4" fill="{HIGHLIGHT}"/>
<text x="10" y="19" font-size="14" font-weight="bold" fill="#222">{title}<tspan font-size="11" font-weight="normal"
 fill="#555">, 10 per 10 s</tspan></text>
<text x="682" y="18" font-size="12" font-weight="bold" fill="#222" text-anchor="middle">{caption}</text>
<g text-anchor="middle">
{borders}{phases}</g>
<path d="M92 {full:.1}H791M92 {EMPTY:.1}H791M92 {GROUND:.1}H791" stroke="#ccc"/>
<text x="10" y="73">remaining</text>
<g text-anchor="end"><text x="87" y="{full_text:.1}">10</text><text x="87" y="{empty_text:.1}">0</text></g>
<path d="{remaining}" fill="none" stroke="#222" stroke-width="1.5"/>
<path d="{granted_key}{granted}" fill="{GRANTED}"/>
<text x="22" y="131" fill="{GRANTED}">granted</text>
<path d="{denied_key}{denied}" fill="none" stroke="{DENIED}" stroke-width="1.1"/>
<text x="22" y="163" fill="{DENIED}">denied</text>
</svg>
"##,
            band = x(end - PERIOD),
            width = x(PERIOD) - x(0),
            full = EMPTY - UNIT * f64::from(LIMIT),
            full_text = EMPTY - UNIT * f64::from(LIMIT) + 4.0,
            empty_text = EMPTY + 4.0,
            remaining = self.remaining_line(),
            granted_key = square(13.0, 127.0),
            granted = self.marks(true, square),
            denied_key = cross(13.0, 159.0),
            denied = self.marks(false, cross),
        )
    }

    fn remaining_line(&self) -> String {
        let mut line = String::new();
        let mut before = None;
        for (time, remaining) in &self.remaining {
            let y = EMPTY - UNIT * f64::from(*remaining);
            if before.is_none() {
                let _ = write!(line, "M{:.1} {y:.1}", x(*time));
            } else if before != Some(remaining) {
                let _ = write!(line, "H{:.1}V{y:.1}", x(*time));
            }
            before = Some(remaining);
        }
        let _ = write!(line, "H{:.1}", x(END));
        line
    }

    /// A mark for each granted or denied request: marks of one time are stacked.
    fn marks(&self, granted: bool, mark: fn(f64, f64) -> String) -> String {
        let (mut marks, mut last, mut height) = (String::new(), None, 0.0);
        for (time, _) in self.requests.iter().filter(|request| request.1 == granted) {
            height = if last == Some(time) {
                height + PITCH
            } else {
                PITCH
            };
            marks += &mark(
                x(*time),
                if granted {
                    GROUND - height
                } else {
                    GROUND + height
                },
            );
            last = Some(time);
        }
        marks
    }
}

/// Where a time is on the picture.
fn x(time: i64) -> f64 {
    92.0 + 699.0 * (time - START) as f64 / (END - START) as f64
}

fn text(x: f64, y: f64, text: &str) -> String {
    format!("<text x=\"{x:.1}\" y=\"{y:.1}\">{text}</text>\n")
}

/// Where a window of the clock begins.
fn border(time: i64) -> String {
    let line = format!(
        "<path d=\"M{:.1} 42V202\" stroke=\"#bbb\" stroke-dasharray=\"2 2\"/>\n",
        x(time)
    );
    line + &text(x(time), 215.0, &format!("{} s", time / 1_000))
}

fn square(x: f64, y: f64) -> String {
    format!(
        "M{:.1} {:.1}h{MARK}v{MARK}h-{MARK}z",
        x - MARK / 2.0,
        y - MARK / 2.0
    )
}

fn cross(x: f64, y: f64) -> String {
    let (left, top) = (x - MARK / 2.0, y - MARK / 2.0);
    format!("M{left:.1} {top:.1}l{MARK} {MARK}m0-{MARK}l-{MARK} {MARK}")
}

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

use svg::{strong, svg, text};

#[expect(
    dead_code,
    reason = "these pictures name their rows, and need no legend"
)]
#[path = "../xtask/src/svg.rs"]
mod svg;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const LIMIT: u32 = 10;
const PERIOD: i64 = 10_000;

/// The trace, in milliseconds; a window of the clock begins at 0.
const START: i64 = -1_000;
const END: i64 = 39_000;
const STEP: usize = 100;
const PHASES: [(i64, &str); 4] = [
    (3_500, "trickle"),
    (10_700, "two bursts of 15"),
    (19_500, "silence"),
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
    for name in ["throughput", "leases-plot", "outage"] {
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

/// The plot, from left to right.
const LEFT: f64 = 122.0;
const RIGHT: f64 = 712.0;
/// The line at which nothing remains, and the height of a unit above it.
const EMPTY: f64 = 128.0;
const UNIT: f64 = 5.0;
/// The line that granted requests are stacked on and denied ones hang from.
const GROUND: f64 = 194.0;
/// The lowest end of the plot.
const BOTTOM: f64 = 284.0;
/// From one mark of a stack to the next, and the size of a mark.
const PITCH: f64 = 5.6;
const WIDTH: f64 = 3.0;
const HEIGHT: f64 = 4.6;

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
        let caption = format!("at most {most} granted in 10 s");
        let full = EMPTY - UNIT * f64::from(LIMIT);

        let mut shapes = format!(
            "<rect class=\"band\" x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\"/>\n\
             <rect class=\"band\" x=\"440\" y=\"6\" width=\"272\" height=\"26\" rx=\"4\"/>\n",
            x(end - PERIOD),
            full - 6.0,
            x(PERIOD) - x(0),
            BOTTOM - full + 6.0,
        );
        let quota = "<tspan style=\"font-weight:400\">, 10 per 10 s</tspan>";
        shapes += &strong(10.0, 25.0, "start", format!("{title}{quota}"));
        shapes += &strong(576.0, 25.0, "middle", &caption);
        for (time, name) in PHASES {
            shapes += &text(x(time), 60.0, "middle", name);
        }
        for time in (0..END).step_by(PERIOD as usize) {
            shapes += &border(time, full);
        }
        for y in [full, EMPTY, GROUND] {
            shapes += &format!("<path class=\"axis\" d=\"M{LEFT} {y:.1}H{RIGHT}\"/>\n");
        }
        shapes += &text(LEFT - 6.0, full + 6.0, "end", LIMIT);
        shapes += &text(LEFT - 6.0, EMPTY + 6.0, "end", 0);
        shapes += &text(10.0, (full + EMPTY) / 2.0 + 6.0, "start", "remaining");
        shapes += &format!(
            "<path class=\"curve text\" d=\"{}\"/>\n",
            self.remaining_line()
        );
        shapes += &format!(
            "<path class=\"area blue\" d=\"{}{}\"/>\n",
            square(14.0, GROUND - 14.0),
            self.marks(true, square),
        );
        shapes += &text(24.0, GROUND - 8.0, "start", "granted");
        shapes += &format!(
            "<path class=\"curve orange\" style=\"stroke-width:1.3\" d=\"{}{}\"/>\n",
            cross(14.0, GROUND + 18.0),
            self.marks(false, cross),
        );
        shapes += &text(24.0, GROUND + 24.0, "start", "denied");
        let all = format!("{title}, 10 per 10 s: {caption}");
        svg(314, &all, &shapes)
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
    LEFT + (RIGHT - LEFT) * (time - START) as f64 / (END - START) as f64
}

/// Where a window of the clock begins.
fn border(time: i64, top: f64) -> String {
    let x = x(time);
    format!(
        "<path class=\"border\" d=\"M{x:.1} {top:.1}V{BOTTOM}\"/>
"
    ) + &text(x, BOTTOM + 20.0, "middle", format!("{} s", time / 1_000))
}

fn square(x: f64, y: f64) -> String {
    let (left, top) = (x - WIDTH / 2.0, y - HEIGHT / 2.0);
    format!("M{left:.1} {top:.1}h{WIDTH}v{HEIGHT}h-{WIDTH}z")
}

fn cross(x: f64, y: f64) -> String {
    let (left, top) = (x - WIDTH / 2.0, y - HEIGHT / 2.0);
    format!("M{left:.1} {top:.1}l{WIDTH} {HEIGHT}m0-{HEIGHT}l-{WIDTH} {HEIGHT}")
}

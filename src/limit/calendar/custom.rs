//! Windows by a function of the application, such as the billing periods of a contract.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::{Range, RangeInclusive};
use std::sync::{LazyLock, Mutex, PoisonError, RwLock};
use std::time::{Duration, SystemTime};

use super::Window;

pub(super) type WindowOf = fn(SystemTime) -> Range<SystemTime>;

/// The windows of a function. The process keeps each function that it has used, so that a calendar is `Copy`.
#[derive(Clone, Copy)]
pub(super) struct CustomWindows(&'static CalledWindows);

struct CalledWindows {
    name: &'static str,
    window_of: WindowOf,
    /// The end of each window that was needed lately, by its start. A decision reads them, so that it calls no function
    /// of the application under a lock.
    known: RwLock<BTreeMap<i64, i64>>,
}

/// Maximum number of known windows: the three around the clock of each of several stores.
const MAX_KNOWN: usize = 64;
/// Valid lengths of a window, in microseconds.
const LENGTHS: RangeInclusive<i64> = 1_000_000..=super::LONGEST;

/// By the name and the address of the function.
static ALL: LazyLock<Mutex<HashMap<(&str, usize), CustomWindows>>> = LazyLock::new(Mutex::default);

impl CustomWindows {
    pub(super) fn new(name: &'static str, window_of: WindowOf) -> Self {
        let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        let id = (name, window_of as usize);
        if let Some(known) = all.get(&id) {
            return *known;
        }
        let kept = Self(Box::leak(Box::new(CalledWindows {
            name,
            window_of,
            known: RwLock::default(),
        })));
        all.insert(id, kept);
        kept
    }

    pub(super) const fn name(self) -> &'static str {
        self.0.name
    }

    /// Calls the function for the windows around an instant, unless it has returned them before.
    ///
    /// # Errors
    ///
    /// Names the problem of a window.
    pub(super) fn prepare(self, now: i64) -> Result<(), String> {
        if self.borders(now).is_some() {
            return Ok(());
        }
        let window = self.call(now)?;
        let before = self.call(window.start - 1)?;
        let after = self.call(window.end)?;
        for (one, next) in [(before, window), (window, after)] {
            if one.end != next.start {
                return Err(format!(
                    "the window that ends {} and the next one, which starts {}, do not touch",
                    Shown(one.end),
                    Shown(next.start)
                ));
            }
        }
        let mut known = self.0.known.write().unwrap_or_else(PoisonError::into_inner);
        for Window { start, end } in [before, window, after] {
            // Even, as whole seconds are: an odd end marks a count that is extended.
            known.insert(start & !1, end & !1);
        }
        while known.len() > MAX_KNOWN
            && let Some((&first, _)) = known.first_key_value()
            && let Some((&last, _)) = known.last_key_value()
        {
            let furthest = if now.abs_diff(first) > now.abs_diff(last) {
                first
            } else {
                last
            };
            known.remove(&furthest);
        }
        Ok(())
    }

    /// Returns the window of an instant by the function.
    fn call(self, now: i64) -> Result<Window, String> {
        let Range { start, end } = (self.0.window_of)(time_of(now));
        let window = Window {
            start: micros_of(start),
            end: micros_of(end),
        };
        let Window { start, end } = window;
        if now < start || end <= now {
            return Err(format!(
                "its window for the instant {} does not contain it, but starts {} and ends {}",
                Shown(now),
                Shown(start),
                Shown(end)
            ));
        }
        if !LENGTHS.contains(&(end - start)) {
            return Err(format!(
                "its window that starts {} lasts {:?}, but must last 1 second to 366 days",
                Shown(start),
                Duration::from_micros((end - start) as u64)
            ));
        }
        Ok(window)
    }

    /// Returns the known window that contains an instant.
    pub(super) fn window(self, now: i64) -> Option<Window> {
        let known = self.0.known.read().unwrap_or_else(PoisonError::into_inner);
        containing(&known, now)
    }

    /// Returns the borders of the known window that contains an instant, and of the nearer neighbor.
    pub(super) fn borders(self, now: i64) -> Option<[i64; 3]> {
        let known = self.0.known.read().unwrap_or_else(PoisonError::into_inner);
        let Window { start, end } = containing(&known, now)?;
        if now - start < end - now {
            let before = containing(&known, start - 1)?;
            Some([before.start, start, end])
        } else {
            let after = containing(&known, end)?;
            Some([start, end, after.end])
        }
    }
}

fn containing(known: &BTreeMap<i64, i64>, now: i64) -> Option<Window> {
    let (&start, &end) = known.range(..=now).next_back()?;
    if end <= now {
        return None;
    }
    Some(Window { start, end })
}

/// Converts microseconds since the Unix epoch.
fn time_of(micros: i64) -> SystemTime {
    let distance = Duration::from_micros(micros.unsigned_abs());
    if micros < 0 {
        SystemTime::UNIX_EPOCH - distance
    } else {
        SystemTime::UNIX_EPOCH + distance
    }
}

/// Returns microseconds since the Unix epoch, rounded down, and at most about 146,000 years from it: no difference
/// overflows.
fn micros_of(time: SystemTime) -> i64 {
    const FURTHEST: u128 = (1 << 62) - 1;
    match time.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(after) => after.as_micros().min(FURTHEST) as i64,
        Err(error) => {
            let before = error.duration().as_nanos().div_ceil(1_000);
            -(before.min(FURTHEST) as i64)
        }
    }
}

/// Shows an instant as seconds since the Unix epoch.
struct Shown(i64);

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = if self.0 < 0 { "-" } else { "" };
        let whole = self.0.unsigned_abs() / 1_000_000;
        match self.0.unsigned_abs() % 1_000_000 {
            0 => write!(f, "{sign}{whole} s"),
            micros => write!(f, "{sign}{whole}.{micros:06} s"),
        }
    }
}

impl fmt::Debug for CustomWindows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// By the name: one function may have several addresses.
impl PartialEq for CustomWindows {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
    }
}

impl Eq for CustomWindows {}

impl Hash for CustomWindows {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name().hash(state);
    }
}

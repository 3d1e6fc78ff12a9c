use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Lets something happen once, such as a report of a problem that every request finds.
#[derive(Debug, Default)]
pub(crate) struct FirstTime(AtomicBool);

impl FirstTime {
    pub(crate) const fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    /// Returns `true` to the first caller only.
    #[inline]
    pub(crate) fn is_now(&self) -> bool {
        // Only the first callers write: later requests share the cache line.
        !self.is_over() && !self.0.swap(true, Relaxed)
    }

    /// Returns `true` after the first time.
    #[inline]
    pub(crate) fn is_over(&self) -> bool {
        self.0.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_call_is_the_first() {
        let first = FirstTime::new();
        assert!(!first.is_over());
        assert_eq!([(); 3].map(|()| first.is_now()), [true, false, false]);
        assert!(first.is_over());
    }
}

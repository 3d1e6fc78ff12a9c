use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Something that happens at most once, such as a report.
#[derive(Debug, Default)]
pub(crate) struct OnceFlag(AtomicBool);

impl OnceFlag {
    pub(crate) const fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    /// Returns `true` after the first [`claim`](Self::claim). Cheap enough for each request.
    #[inline]
    pub(crate) fn is_claimed(&self) -> bool {
        self.0.load(Relaxed)
    }

    /// Returns `true` for the first call only, of all threads. Later calls write nothing.
    pub(crate) fn claim(&self) -> bool {
        !self.is_claimed() && !self.0.swap(true, Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_first_call_claims() {
        let flag = OnceFlag::new();
        assert!(!flag.is_claimed());
        assert_eq!([flag.claim(), flag.claim()], [true, false]);
        assert!(flag.is_claimed());
    }
}

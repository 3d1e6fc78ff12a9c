/// How what was charged is freed again. Waiting requests depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Frees {
    /// Gradually, at the rate of the quota, debts too.
    Gradually,
    /// The whole limit at once after each period, debts too.
    InBatches,
    /// At once, with its window or its cell.
    WithWindow,
    /// Each charge by itself, a period after it was made.
    OneByOne,
    /// As an estimate within two periods: nothing in the first, then gradually.
    Fading,
    /// When a request ends.
    OnRelease,
}

impl Frees {
    /// Whether it refills from a debt to a burst: then a quota may have a burst other than its limit.
    pub(crate) fn has_burst(self) -> bool {
        match self {
            Self::Gradually | Self::InBatches => true,
            Self::WithWindow | Self::OneByOne | Self::Fading | Self::OnRelease => false,
        }
    }

    /// Whether it refills all the time, so that a debt is paid at a moment that is known.
    pub(crate) fn is_gradual(self) -> bool {
        match self {
            Self::Gradually => true,
            Self::InBatches
            | Self::WithWindow
            | Self::OneByOne
            | Self::Fading
            | Self::OnRelease => false,
        }
    }
}

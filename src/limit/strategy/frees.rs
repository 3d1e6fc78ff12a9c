/// How what was charged comes free again. That is what those who wait go by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Frees {
    /// Little by little, at the rate of the quota. What is owed does too.
    Gradually,
    /// As much as the limit at once, after each period, also of what is owed.
    InBatches,
    /// At once, with its window or its cell.
    WithWindow,
    /// Each charge by itself, a period after it was made.
    OneByOne,
    /// As an estimate: within two periods, first in none and then little by little.
    Fading,
    /// When a request ends.
    OnRelease,
}

impl Frees {
    /// Whether it fills up again, from what is owed to a burst: a quota may have one other than its limit.
    pub(crate) fn has_burst(self) -> bool {
        matches!(self, Self::Gradually | Self::InBatches)
    }
}

/// How the capacity is freed after a charge. Wait queues depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Frees {
    /// Gradually, at the rate of the quota; a debt too.
    Gradually,
    /// The whole limit at the end of each period; a debt too.
    InBatches,
    /// All charges of a window together, when it ends.
    WithWindow,
    /// All charges of a cell together, a period after it ends.
    WithCell,
    /// Each charge separately, a period after it was made.
    OneByOne,
    /// As an estimate within two periods: nothing in the first, then gradually.
    Fading,
    /// When a request ends.
    OnRelease,
}

impl Frees {
    /// Returns `true` if the strategy refills up to a burst: then a quota's burst may differ from
    /// its limit, and debts are possible.
    pub(crate) fn has_burst(self) -> bool {
        match self {
            Self::Gradually | Self::InBatches => true,
            Self::WithWindow | Self::WithCell | Self::OneByOne | Self::Fading | Self::OnRelease => {
                false
            }
        }
    }

    /// Returns `true` if the strategy refills continuously, so that the time at which a debt is
    /// paid is predictable.
    pub(crate) fn is_gradual(self) -> bool {
        match self {
            Self::Gradually => true,
            Self::InBatches
            | Self::WithWindow
            | Self::WithCell
            | Self::OneByOne
            | Self::Fading
            | Self::OnRelease => false,
        }
    }
}

use crate::limit::Decision;

/// The decisions of policies that are not enforced: an extension of the response.
///
/// It is present behind a layer in [dry run](crate::RateLimitLayer::dry_run), or with a
/// [shadow](crate::RateLimitLayer::shadow).
#[derive(Debug, Clone, Default)]
pub struct DryRun {
    decisions: Vec<Decision>,
}

impl DryRun {
    /// The decisions, one per list of policies: first the layer's own policies, then its shadows in
    /// the order in which they were added. Checks that no store could decide are missing.
    pub fn decisions(&self) -> &[Decision] {
        &self.decisions
    }

    /// Returns `true` if all decisions allow the request.
    pub fn is_allowed(&self) -> bool {
        self.decisions.iter().all(Decision::is_allowed)
    }

    pub(super) fn extend(&mut self, decisions: impl Iterator<Item = Decision>) {
        self.decisions.extend(decisions);
    }
}

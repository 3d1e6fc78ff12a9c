use crate::limit::Decision;

/// The decisions of policies that reject nothing: in the extensions of a response.
///
/// It is present behind a layer in [dry run](crate::RateLimitLayer::dry_run), or with a
/// [shadow](crate::RateLimitLayer::shadow).
#[derive(Debug, Clone, Default)]
pub struct DryRun {
    decisions: Vec<Decision>,
}

impl DryRun {
    /// The decisions, one for each such list of policies: of a layer's own policies first, then of its shadows in their
    /// order. Checks that no store could decide are left out.
    pub fn decisions(&self) -> &[Decision] {
        &self.decisions
    }

    /// Whether all of them allow the request.
    pub fn is_allowed(&self) -> bool {
        self.decisions.iter().all(Decision::is_allowed)
    }

    pub(super) fn extend(&mut self, decisions: impl Iterator<Item = Decision>) {
        self.decisions.extend(decisions);
    }
}

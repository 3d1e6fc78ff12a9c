use super::*;

/// Writes the events of an instance to the log.
pub(in super::super) struct LogObserver {
    pub(in super::super) world: World,
    pub(in super::super) instance: usize,
}

impl Observer for LogObserver {
    fn failed(&self, event: &event::Failed<'_>) {
        self.world.state().fails(self.instance, event.error);
    }

    fn degraded(&self, event: &event::Degraded<'_>) {
        let (instance, kind) = (self.instance, event.error.kind());
        let mut state = self.world.state();
        let now = state.now();
        state.degraded[instance] = true;
        state.turned[instance] = now.max(state.turned[instance]);
        state.ledger.opened += 1;
        state.streaks[instance] = FailureStreak::default();
        state.say(None, || {
            format!("i{instance}       is degraded: {}", kind.as_str())
        });
    }

    fn recovered(&self, &event::Recovered { after, .. }: &event::Recovered) {
        let instance = self.instance;
        let mut state = self.world.state();
        state.degraded[instance] = false;
        state.streaks[instance] = FailureStreak::default();
        state.say(None, || {
            format!("i{instance}       has recovered after {after:?}")
        });
    }

    fn reconciled(&self, &event::Reconciled { charged, dropped }: &event::Reconciled) {
        let instance = self.instance;
        self.world.state().say(None, || {
            format!("i{instance}       has reconciled {charged}, and dropped {dropped}")
        });
    }
}

use super::*;

/// Writes the events of an instance to the log.
pub(in super::super) struct LogObserver {
    pub(in super::super) world: World,
    pub(in super::super) instance: usize,
}

impl Observer for LogObserver {
    fn notify(&self, event: &Event<'_>) {
        match *event {
            Event::Failed { error, .. } => {
                self.world.state().fails(self.instance, error);
            }
            Event::Degraded { error, .. } => {
                let (instance, kind) = (self.instance, error.kind());
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
            Event::Recovered { after, .. } => {
                let instance = self.instance;
                let mut state = self.world.state();
                state.degraded[instance] = false;
                state.streaks[instance] = FailureStreak::default();
                state.say(None, || {
                    format!("i{instance}       has recovered after {after:?}")
                });
            }
            Event::Reconciled { charged, dropped } => {
                let instance = self.instance;
                self.world.state().say(None, || {
                    format!("i{instance}       has reconciled {charged}, and dropped {dropped}")
                });
            }
            _ => {}
        }
    }
}

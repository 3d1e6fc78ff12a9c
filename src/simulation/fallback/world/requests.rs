//! The requests to the primary store, and their outcomes.

use super::*;
use crate::simulation::in_redis;

impl WorldState {
    /// A request is sent to the primary store. Returns its number and its fate.
    pub(in super::super) fn arrives(&mut self, instance: usize, check: &Check) -> (usize, Fate) {
        let (request, caller, ask) = (self.requests.len(), self.caller(check), self.current);
        let reconciled = caller.filter(|_| ask.is_none()).map(|caller| Reconciled {
            caller,
            instance,
            is_reset: check.mode() == Mode::Reset,
            cost: i64::from(check.cost()),
        });
        if let Some(ask) = ask {
            (self.asks[ask].asked, self.asks[ask].unsent) = (true, false);
        }
        let now = self.now();
        let fate = match &self.calls[instance] {
            Some((at, fate)) if *at == now && self.plan.batched && ask.is_some() => fate.clone(),
            _ => self.fate(instance, now),
        };
        if let Some(ask) = ask {
            self.calls[instance] = Some((now, fate.clone()));
            self.streaks[instance].sends(ask);
        }
        if ask.is_none() {
            // Until the reply, or until the instance gives up.
            self.turned[instance] = now + 2 * self.plan.deadline;
            let what = if caller.is_some() {
                "reconciles"
            } else {
                "probes"
            };
            self.say(caller, || {
                format!("i{instance}       {what}: {}", shown(check))
            });
        }
        if let Some(reconciled) = &reconciled {
            self.ledger.reconciles(&self.plan, now, reconciled);
        }
        self.requests.push(Request {
            instance,
            caller,
            ask,
            reconciled,
            sent: false,
            ran: false,
        });
        (request, fate)
    }

    pub(super) fn fate(&mut self, instance: usize, now: u64) -> Fate {
        let deadline = self.plan.deadline;
        let rng = &mut self.rng;
        let mut faults = self.plan.faults.iter();
        let fault = faults.find(|fault| {
            (fault.from..fault.until).contains(&now) && fault.instances >> instance & 1 == 1
        });
        let well = Fate {
            queued: rng.u64(..2),
            sent: rng.u64(..3),
            runs: true,
            back: rng.u64(..3),
            answer: Reply::Decision,
        };
        let Some(fault) = fault else { return well };
        const SOME: [Kind; 8] = [
            Kind::Down,
            Kind::Refusing,
            Kind::RefusingSome,
            Kind::QueueFull,
            Kind::LosingRequests,
            Kind::LosingReplies,
            Kind::Cutting,
            Kind::Late,
        ];
        let kind = match fault.kind {
            Kind::Mixed if rng.bool() => return well,
            Kind::Mixed => *pick(rng, &SOME),
            kind => kind,
        };
        let error = |kind| Reply::Error(StoreError::new(kind));
        let at_once = |answer| Fate {
            queued: 0,
            sent: 0,
            runs: false,
            back: 0,
            answer,
        };
        match kind {
            Kind::Down | Kind::Emptied => Fate {
                queued: if rng.bool() { 0 } else { rng.u64(..5) },
                ..at_once(Reply::Error(
                    StoreError::new(ErrorKind::Unreachable).not_sent(),
                ))
            },
            Kind::Refusing => Fate {
                runs: false,
                answer: error(ErrorKind::Refused),
                ..well
            },
            Kind::RefusingSome
            | Kind::QueueFull
            | Kind::LosingRequests
            | Kind::LosingReplies
            | Kind::Cutting
                if rng.u8(..3) == 0 =>
            {
                well
            }
            Kind::RefusingSome => Fate {
                runs: false,
                answer: Reply::Error(StoreError::new(ErrorKind::Refused).check_only()),
                ..well
            },
            Kind::QueueFull => at_once(Reply::Error(
                StoreError::new(ErrorKind::QueueFull).not_sent(),
            )),
            Kind::LosingRequests => Fate {
                runs: false,
                answer: Reply::Never,
                ..well
            },
            Kind::LosingReplies => Fate {
                answer: Reply::Never,
                ..well
            },
            Kind::Cutting => Fate {
                answer: error(ErrorKind::Unreachable),
                ..well
            },
            Kind::Late => {
                let sent = rng.u64(..deadline);
                Fate {
                    sent,
                    back: rng.u64(deadline / 2..deadline * 5 / 4) - sent / 2,
                    ..well
                }
            }
            Kind::Slow => Fate {
                queued: rng.u64(..deadline * 2),
                sent: rng.u64(deadline..deadline * 5),
                ..well
            },
            Kind::Frozen => Fate {
                sent: fault.until - now + rng.u64(..5),
                ..well
            },
            Kind::Mixed => well,
        }
    }

    /// A request leaves the queue.
    pub(in super::super) fn sends(&mut self, request: usize) {
        self.requests[request].sent = true;
    }

    /// An instance withdraws a request, if it is still queued.
    pub(in super::super) fn withdraws(&mut self, request: usize) -> bool {
        let Request {
            instance,
            caller,
            ask,
            sent,
            ..
        } = self.requests[request];
        if sent {
            return false;
        }
        if let Some(ask) = ask {
            self.asks[ask].unsent = true;
        }
        let now = self.now();
        if let Some(reconciled) = self.requests[request].reconciled.take() {
            self.ledger.failed(now, &reconciled, true);
        }
        let whose = ask.map_or(String::new(), |ask| format!("#{ask}"));
        self.say(caller, || {
            format!("i{instance} {whose:<5} is withdrawn, not sent")
        });
        true
    }

    /// A request is executed.
    pub(in super::super) fn runs(&mut self, request: usize, check: Check) -> Decision {
        let Request {
            instance,
            caller,
            ask,
            reconciled,
            ..
        } = self.requests[request];
        self.requests[request].ran = true;
        let decision = in_redis(self.counts(&check));
        let (mode, granted, id) = (check.mode(), decision.granted().into(), check.id().copied());
        let id = id.as_ref().map(Key::as_bytes);
        if let (Some(caller), Some(ask)) = (caller, ask) {
            self.asks[ask].ran = self.ledger.ran(caller, mode, granted, id);
        }
        if let Some(reconciled) = reconciled {
            self.ledger.reconciled(&reconciled, granted);
        }
        if caller.is_some() {
            let whose = ask.map_or(String::new(), |ask| format!("#{ask}"));
            self.say(caller, || {
                format!(
                    "i{instance} {whose:<5} runs in Redis: {}",
                    verdict(&decision)
                )
            });
        }
        decision
    }

    fn counts(&self, check: &Check) -> Decision {
        // The local store replies immediately.
        let decision = self.counts.check(check.clone()).now_or_never();
        decision.unwrap().unwrap()
    }

    /// A request is answered, if its future still exists.
    pub(in super::super) fn answers(&mut self, request: usize, error: Option<&StoreError>) {
        let Request {
            instance,
            caller,
            ask,
            reconciled,
            ran,
            ..
        } = self.requests[request];
        let Some(error) = error else {
            if caller.is_none() {
                let now = self.now();
                self.streaks[instance].replies(now);
            }
            return;
        };
        if let Some(ask) = ask {
            self.asks[ask].unsent = error.is_not_sent();
        }
        let now = self.now();
        if let (Some(reconciled), false) = (reconciled, ran) {
            self.ledger.failed(now, &reconciled, error.is_not_sent());
        }
        if !error.is_not_sent() && !error.is_check_only() {
            self.abandons(request);
        }
        let whose = ask.map_or(String::new(), |ask| format!("#{ask}"));
        let known = if error.is_not_sent() {
            ", not sent"
        } else {
            ""
        };
        self.say(caller, || {
            format!(
                "i{instance} {whose:<5} fails in Redis: {}{known}",
                error.kind().as_str()
            )
        });
    }

    /// An instance has no reply to a request that may have been executed, or may be yet.
    pub(in super::super) fn abandons(&mut self, request: usize) {
        if let Some(reconciled) = &self.requests[request].reconciled {
            self.ledger.unanswered(reconciled);
        }
    }

    /// The reply to a request was lost.
    pub(in super::super) fn lost(&mut self, request: usize) {
        let Request {
            instance,
            caller,
            ask,
            reconciled,
            ran,
            ..
        } = self.requests[request];
        let now = self.now();
        if let (Some(reconciled), false) = (reconciled, ran) {
            self.ledger.failed(now, &reconciled, false);
        }
        let what = if ran {
            "the answer is lost"
        } else {
            "the request is lost"
        };
        self.say(caller, || {
            format!(
                "i{instance} {:<5} {what}",
                ask.map_or(String::new(), |ask| format!("#{ask}"))
            )
        });
    }

    /// The future was dropped before the request was sent.
    pub(in super::super) fn withdrawn(&mut self, request: usize) {
        let Request {
            instance,
            caller,
            ask,
            reconciled,
            ..
        } = self.requests[request];
        let now = self.now();
        if let Some(reconciled) = reconciled {
            self.ledger.failed(now, &reconciled, false);
        }
        let whose = ask.map_or(String::new(), |ask| format!("#{ask}"));
        self.say(caller, || {
            format!("i{instance} {whose:<5} never sent: its future was dropped")
        });
    }

    /// An instance reports a failed request to its observer.
    pub(super) fn fails(&mut self, instance: usize, error: &StoreError) {
        let Some(ask) = self.current.filter(|_| !self.degraded[instance]) else {
            return;
        };
        if error.is_check_only() || error.kind() == ErrorKind::QueueFull {
            return;
        }
        let now = self.now();
        let failures = self.streaks[instance].fails(now, ask);
        if failures == self.plan.failures {
            self.checks(Rule::Silence);
        }
        if failures > self.plan.failures {
            let problem = format!(
                "i{instance} has sent one request after another, of which {failures} failed"
            );
            self.breaks(Rule::Silence, None, problem);
        }
    }
}

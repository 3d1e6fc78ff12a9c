use std::mem;

/// Takes a service that has been polled ready, and leaves a clone, which has not.
///
/// Call it, or drop it at once: it may hold a permit that others wait for, such as `ConcurrencyLimit`'s.
pub(super) fn take_ready<T: Clone>(inner: &mut T) -> T {
    let clone = inner.clone();
    mem::replace(inner, clone)
}

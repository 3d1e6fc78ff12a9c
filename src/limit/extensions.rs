use std::any::Any;
use std::sync::OnceLock;

/// Values that other modules keep with a list of policies, one of each type. It takes no lock: each cell is written once.
/// Few types are used, and usually one.
#[derive(Default)]
pub(super) struct Extensions {
    value: OnceLock<Box<dyn Any + Send + Sync>>,
    others: OnceLock<Box<Extensions>>,
}

impl Extensions {
    /// Returns the value of this type, which is created at its first use.
    #[inline]
    pub(super) fn get<T: Default + Send + Sync + 'static>(&self) -> &T {
        let mut cell = self;
        loop {
            let value = cell.value.get_or_init(|| Box::new(T::default()));
            if let Some(value) = value.downcast_ref() {
                return value;
            }
            cell = cell.others.get_or_init(Box::default);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

    use super::*;

    #[test]
    fn each_type_has_one_value() {
        let extensions = Extensions::default();
        extensions.get::<AtomicU32>().store(7, Relaxed);
        let text: &OnceLock<&str> = extensions.get();
        assert_eq!(text.set("one"), Ok(()));
        assert_eq!(extensions.get::<OnceLock<&str>>().get(), Some(&"one"));
        assert_eq!(extensions.get::<AtomicU32>().load(Relaxed), 7);
    }
}

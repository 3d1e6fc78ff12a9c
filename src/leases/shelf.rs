//! The books of each store in this process.
//!
//! A store counts what an instance holds as one number, whoever takes it: two layers, or a layer and a
//! [`Limiter`](crate::Limiter). Each with books of its own would put the store wrong by what the other holds.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, Weak};

use super::Books;
use crate::store::lock;

static SHELF: LazyLock<Mutex<HashMap<usize, Weak<Books>>>> = LazyLock::new(Mutex::default);

/// The books of the store of this identity; opened, if there are none. Those of a store without an identity are always new.
///
/// Who has books, or a request in them, keeps the store, so that no other has its identity meanwhile.
pub(super) fn find(identity: Option<usize>) -> Arc<Books> {
    let Some(identity) = identity else { return Arc::new(Books::new()) };
    let shelf = &mut *lock(&SHELF);
    if let Some(books) = shelf.get(&identity).and_then(Weak::upgrade) {
        return books;
    }
    shelf.retain(|_, books| books.strong_count() > 0);
    let books = Arc::new(Books::new());
    shelf.insert(identity, Arc::downgrade(&books));
    books
}

//! Lists in messages.

/// The first few of `items`, and how many more there are.
pub(crate) fn some_of(items: impl IntoIterator<Item = String>) -> String {
    const SHOWN: usize = 8;
    let mut items = items.into_iter();
    let shown = items.by_ref().take(SHOWN).collect::<Vec<_>>().join(", ");
    match items.count() {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

//! Lists in messages.

/// The first few of `items`, and how many more there are; those are not even made.
pub(crate) fn some_of<I>(items: I) -> String
where
    I: IntoIterator<Item = String, IntoIter: ExactSizeIterator>,
{
    const SHOWN: usize = 8;
    let mut items = items.into_iter();
    let shown = items.by_ref().take(SHOWN).collect::<Vec<_>>().join(", ");
    match items.len() {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

//! Lists in messages.

/// Lists the first few of `items` and the number of the others, which are not formatted.
pub fn some_of<I>(items: I) -> String
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

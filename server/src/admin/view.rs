//! The part of the cluster that a page shows, as the query of its address: `?jobs=2&events=error`.

use std::fmt::{self, Write as _};

use zeroshard_coordinator::operators::{history::Severity, overview::View};

/// Reads a query. What it does not name, or names wrongly, has its default.
pub(super) fn parse(query: &str) -> View {
    let mut view = View::default();
    for (name, value) in query.split('&').filter_map(|part| part.split_once('=')) {
        match name {
            "jobs" => view.page = value.parse::<usize>().unwrap_or(1).saturating_sub(1),
            "job" => view.job = u64::from_str_radix(value, 16).ok(),
            "events" => {
                let named = Severity::ALL.into_iter().find(|of| of.label() == value);
                view.events = named.unwrap_or_default();
            }
            _ => {}
        }
    }
    view
}

/// The address of the page that shows a view.
pub(super) struct Link(pub(super) View);

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let View { page, job, events } = self.0;
        let mut query = String::new();
        if page > 0 {
            let _ = write!(query, "&amp;jobs={}", page + 1);
        }
        if let Some(job) = job {
            let _ = write!(query, "&amp;job={job:016x}");
        }
        if events != Severity::default() {
            let _ = write!(query, "&amp;events={}", events.label());
        }
        match query.strip_prefix("&amp;") {
            Some(query) => write!(f, "?{query}"),
            None => f.write_str("./"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_of_a_view_leads_back_to_it() {
        let views = [
            View::default(),
            View { page: 3, ..View::default() },
            View { page: 1, job: Some(u64::MAX), events: Severity::Error },
            View { job: Some(1), events: Severity::Warning, page: 0 },
        ];
        for view in views {
            let link = Link(view).to_string().replace("&amp;", "&");
            assert_eq!(parse(link.trim_start_matches('?')), view, "{link}");
        }
    }

    #[test]
    fn a_wrong_query_shows_the_defaults() {
        for query in ["", "&&", "jobs=0", "jobs=-1", "job=<script>", "events=no", "x=1", "jobs"] {
            assert_eq!(parse(query), View::default(), "{query}");
        }
    }
}

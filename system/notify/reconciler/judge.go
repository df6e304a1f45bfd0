package reconciler

import (
	"context"
	"fmt"
	"time"

	"mailproof/system/delivery"
)

// Log is a provider's delivery log, or its list of mails.
type Log interface {
	// Lookup returns everything that the log has about a row's key. An answer
	// that may be a part of it is an error.
	Lookup(ctx context.Context, row delivery.Row) (Page, error)
}

// Page is what a log says about one key.
type Page struct {
	Lines []Line
	// Reach is how far back the log was complete when it was asked: an older
	// session may be missing. Zero: the log does not say, and so proves no
	// absence by silence.
	Reach time.Duration
	// OnePerTry: a try leaves at most one line with its key, as with SMTP, where
	// a server reads the key within the mail. An HTTP server reads it in the head
	// and may log a request that came in half, too.
	OnePerTry bool
}

// Line is one session of one key.
type Line struct {
	ID         string // tells it from every other line
	Key        string
	Event      Event
	ProviderID string // of the copy
}

// Event is how a session ended for the mail.
type Event string

// The events. Any other word proves nothing.
const (
	Stored    Event = "stored"    // a copy was kept
	Duplicate Event = "duplicate" // one was kept before, under the same key
	Deferred  Event = "deferred"  // refused for now, nothing kept
	Rejected  Event = "rejected"  // refused for good, nothing kept
	Closed    Event = "closed"    // it ended early, nothing kept
	Running   Event = "running"   // it has not ended
)

type verdict struct {
	result     Result
	providerID string
	why        string
}

func open(format string, args ...any) verdict {
	return verdict{result: Open, why: fmt.Sprintf(format, args...)}
}

// judge says what the log proves about an UNKNOWN row; now is the database's
// clock from before the log was asked.
func judge(row delivery.Row, p Page, now time.Time, b Bounds) verdict {
	ended := map[string]bool{}
	for _, l := range p.Lines {
		if l.Key != row.DedupeKey {
			continue // a log that looks for the key in its own way
		}
		if l.Event == Stored || l.Event == Duplicate {
			return verdict{Found, l.ProviderID, "the log shows a copy: " + string(l.Event)}
		}
	}
	for _, l := range p.Lines {
		if l.Key != row.DedupeKey {
			continue
		}
		switch l.Event {
		case Deferred, Rejected, Closed:
			ended[l.ID] = true
		case Running:
			return open("a session of it still runs")
		default:
			return open("the log says %q, which is not known here", l.Event)
		}
	}
	// Every claim raises the token and makes one try at most.
	if p.OnePerTry && row.Token > 0 && int64(len(ended)) >= row.Token {
		return verdict{result: Absent, why: fmt.Sprintf("each of %d tries ended without a copy", row.Token)}
	}
	return silence(row, p, now, b)
}

// silence is proof only where a copy could not have been missed.
func silence(row delivery.Row, p Page, now time.Time, b Bounds) verdict {
	switch {
	case p.Reach <= 0:
		return open("the log does not say how far back it is complete")
	case row.FirstClaimedAt == nil:
		return open("the row does not say when it was first claimed")
	case !now.Add(-p.Reach).Before(*row.FirstClaimedAt):
		return open("the log begins after the first try")
	case !now.After(b.after(row.ChangedAt)):
		return open("a copy may still come until %s", b.after(row.ChangedAt).UTC().Format(time.RFC3339))
	}
	return verdict{result: Absent, why: "the log is complete over the whole time in which a copy could have been kept, and shows none"}
}

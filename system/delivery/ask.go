package delivery

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"

	"mailproof/system/contract"
)

// sameKey lists the types whose receiver deduplicates.
func (c Config) sameKey() []string {
	types := []string{}
	for t, p := range c.Policies {
		if p == SameKey {
			types = append(types, string(t))
		}
	}
	slices.Sort(types)
	return types
}

// AskAgain lets an UNKNOWN mail be sent once more under the same key: a receiver
// that had it answers with the id of the first copy, one that had not takes it
// now, and either way there is one. It is a try like each other, with a claim, so
// that a cancel which comes meanwhile is honoured.
//
// lifetime is how long the receiver remembers a key, counted from the first
// claim, less the time that a try may take (OB-09). It is refused, with Applied
// false, for a key that is older, for a type without policy same-key, for a mail
// that a cancel was asked for, that expired or whose campaign was stopped, and
// for another token than the row has.
func (s *Store) AskAgain(ctx context.Context, id uuid.UUID, token int64, lifetime time.Duration) (Outcome, error) {
	out, found, err := s.settle(ctx, sqlAskAgain, id, token, s.cfg.sameKey(), lifetime)
	return s.settled(ctx, "ask again", id, out, found, err)
}

// SameKey reports whether a type's receiver deduplicates.
func (c Config) SameKey(t contract.MailType) bool { return c.Policies[t] == SameKey }

// sqlResolveUnknown ends the alerts about mails that were UNKNOWN and no longer
// are, whatever moved them.
const sqlResolveUnknown = `-- resolve_unknown
UPDATE alerts a SET resolved_at = ` + clock + `
WHERE a.kind = $1 AND a.resolved_at IS NULL
  AND NOT EXISTS (SELECT FROM notifications n WHERE n.dedupe_key = a.dedupe_key AND n.status = 'UNKNOWN')`

// ResolveUnknown marks the alerts of a kind as over whose mail is not UNKNOWN any
// more, and says how many. It looks at states, not at who changed them, so it may
// be repeated and catches up after a crash.
func (s *Store) ResolveUnknown(ctx context.Context, kind string) (int64, error) {
	tag, err := s.db.Exec(ctx, sqlResolveUnknown, kind)
	if err != nil {
		return 0, fmt.Errorf("resolve alerts %s: %w", kind, err)
	}
	return tag.RowsAffected(), nil
}

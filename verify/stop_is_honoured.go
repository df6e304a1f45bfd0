package verify

import (
	"time"

	"mailproof/history"
)

// claimUnderWay is how long a claim may take from its look at the flag to its
// commit, on a busy machine: one that looked before the flag was set may commit
// after it (READ COMMITTED), and its mail goes out in good faith.
const claimUnderWay = time.Second

var stopIsHonoured = rule{
	name:      "stop-is-honoured",
	statement: "Once the stop of a campaign is acknowledged, no further mail of it is claimed: what had not been claimed is never sent (C-14).",
	needs:     needsWAL,
	check: func(e *Evidence, r *report) {
		e.mails(func(m *Mail) {
			if m.Campaign == "" {
				return
			}
			stopped := m.stoppedAt()
			if stopped == 0 {
				return
			}
			r.looked(1)
			for i := range m.Moves {
				mv := &m.Moves[i]
				if late := time.Duration(mv.At - stopped); mv.claim && late > claimUnderWay {
					r.breach(m.Key, "claimed %s after the stop of campaign %s had been acknowledged (commit %d)", late.Round(time.Millisecond), m.Campaign, mv.Order)
				}
			}
		})
	},
}

// stoppedAt is when the first acknowledged stop of the mail's campaign returned,
// 0 if there was none.
func (m *Mail) stoppedAt() int64 {
	for _, o := range m.Ops {
		if o.Name == "stop" && o.Outcome == history.OpOK {
			return o.Return
		}
	}
	return 0
}

package campaign

import (
	"strings"
	"time"

	"mailproof/system/delivery"
)

// State is a campaign as people see it.
type State struct {
	Campaign  string     `json:"campaign"`
	Stopped   bool       `json:"stopped"`
	StoppedAt *time.Time `json:"stopped_at,omitempty"`
	Total     int64      `json:"total"`
	// Counts by status in lower case; a status without mails is left out.
	Counts map[string]int64 `json:"counts"`
	// Reports are SENT mails of which the provider told more: bounced, complained,
	// failed, suppressed.
	Reports       map[string]int64 `json:"provider_reports,omitempty"`
	FirstAccepted *time.Time       `json:"first_accepted,omitempty"`
	LastAccepted  *time.Time       `json:"last_accepted,omitempty"`
	FirstSent     *time.Time       `json:"first_sent,omitempty"`
	LastSent      *time.Time       `json:"last_sent,omitempty"`
}

func stateOf(id string, c delivery.CampaignState) State {
	s := State{
		Campaign: id, Stopped: c.StoppedAt != nil, StoppedAt: c.StoppedAt, Total: c.Total, Counts: map[string]int64{},
		FirstAccepted: c.FirstAccepted, LastAccepted: c.LastAccepted, FirstSent: c.FirstSent, LastSent: c.LastSent,
	}
	for status, n := range c.Counts {
		s.Counts[strings.ToLower(string(status))] = n
	}
	return s
}

package smtp

import (
	"net/http"
	"time"

	"mailproof/fakes/control"
)

// Control is the control API and the page as a handler, for a server of the
// caller's own. Options.HTTPAddr makes the fake serve it itself.
func (s *Server) Control() http.Handler {
	return control.Handler(control.API{
		Name: "smtp",
		Facts: map[string]string{
			"address": s.Addr(), "mode": string(s.opt.Mode), "key header": s.opt.KeyHeader,
		},
		Engine: s.engine, Holds: s.holds, Ledger: s.ledger, Now: s.opt.Clock,
		Presets: presets(),
		Mail:    s.mails.get, Forget: s.mails.reset,
		Open: func(open bool) error {
			if open {
				return s.Listen()
			}
			return s.Refuse()
		},
	})
}

// URL of the control API, "" when there is none.
func (s *Server) URL() string { return s.http.URL() }

func presets() []control.Preset {
	return []control.Preset{
		{Name: "lose each mail's first 250", Rule: On(StageStored, Drop).First(1).Rule()},
		{Name: "lose half of the 250s", Rule: On(StageStored, Drop).Chance(0.5).Rule()},
		{Name: "451 at RCPT", Rule: On(StageRcpt, Reply).Code(451).To("*").Rule()},
		{Name: "greylist for a minute", Rule: On(StageRcpt, Greylist).For(time.Minute).Rule()},
		{Name: "hold before the store", Rule: On(StageDot, HoldUntilReleased).Times(1).Rule()},
		{Name: "answer 250 and discard", Rule: On(StageDot, Reply).Code(250).Times(1).Rule()},
	}
}

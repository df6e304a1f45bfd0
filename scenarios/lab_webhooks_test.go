package scenarios

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"mailproof/history"
	"mailproof/target"
	"mailproof/verify"
)

// teller is a target that tells of one mail what a function says.
type teller struct {
	target.Target
	counting
	told func() (string, error)
}

func (teller) Key(booking string, _ int) string                   { return "ticket:" + booking }
func (t teller) MailTold(context.Context, string) (string, error) { return t.told() }

func TestABounceThatIsNeverToldFails(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		told  func(since time.Duration) (string, error)
		finds int
		fails bool
	}{
		"told at once": {told: func(time.Duration) (string, error) { return "bounced", nil }},
		"told in the end": {told: func(d time.Duration) (string, error) {
			return map[bool]string{true: "bounced", false: "sent"}[d > toldBound/2], nil
		}},
		"never told":        {told: func(time.Duration) (string, error) { return "sent", nil }, finds: 2},
		"nobody can say so": {told: func(time.Duration) (string, error) { return "", errors.New("refused") }, fails: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				var own ownFindings
				began := time.Now()
				who := teller{told: func() (string, error) { return c.told(time.Since(began)) }}
				h := &hooking{
					bench: &Bench{Target: who, Find: own.find}, target: who,
					back: []Booking{{ID: "b1", Recipient: "a@x.test"}, {ID: "b2", Recipient: "b@x.test"}},
				}
				keys, err := h.awaitTold(t.Context())
				require.Equal(t, c.fails, err != nil)
				require.Len(t, own.Findings, c.finds)
				if c.fails {
					return
				}
				require.Equal(t, []string{"ticket:b1", "ticket:b2"}, keys)
				judgeWebhooks(&history.History{Final: &history.Final{}, Faults: []history.Fault{{Name: faultWebhooks, Keys: keys}}}, &own)
				last := own.checked[len(own.checked)-1]
				require.Equal(t, verify.Checked{Name: bouncesAreTold, Statement: last.Statement, Looked: 2, Findings: c.finds}, last)
				for _, f := range own.Findings[:c.finds] {
					require.Equal(t, verify.Fail, f.Verdict)
					require.Contains(t, f.Text, `still tells "sent"`)
				}
			})
		})
	}
}

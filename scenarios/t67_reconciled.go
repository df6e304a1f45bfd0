package scenarios

import (
	"fmt"
	"time"

	"mailproof/history"
	"mailproof/verify"
)

// reconciled is T6.7 under hold with the mail server's log at hand: each mail
// whose 250 was lost becomes UNKNOWN, is found in the log, and ends SENT. Nothing
// is sent a second time, and nothing stays open.
func reconciled() Scenario {
	s := lostReply()
	s.Name = "lab-reconciled"
	s.Title = "the 250 is lost, and what became of the mail is read in the server's log"
	s.Proves = []string{"OB-07"}
	s.Cells = []Cell{cellHold()}
	s.System.ReconcileEvery = 300 * time.Millisecond
	s.Judge = judgeReconciled
	return s
}

func judgeReconciled(h *history.History, own *ownFindings) {
	const name = "unknown-is-resolved"
	columns := verify.DefaultColumns().Mails
	own.check(name, "A mail that the server kept and that became UNKNOWN is found in the server's log and ends SENT.", 0)
	became := map[string]bool{}
	for _, ch := range h.Changes {
		if ch.Table == columns.Table && ch.New[columns.Status] == "UNKNOWN" {
			became[fmt.Sprint(ch.New[columns.Key])] = true
		}
	}
	own.checked[len(own.checked)-1].Looked = len(became)
	for _, row := range h.Final.Rows {
		if row.State != "sent" {
			own.find(verify.Fail, name, row.Key, fmt.Sprintf("with the log at hand each mail ends sent; it is %s", row.State))
		}
	}
	if len(became) == 0 {
		own.find(verify.Invalid, name, "", "at least one mail becomes UNKNOWN; none did")
	}
	own.measure("mails that were UNKNOWN", float64(len(became)), "", "")
}

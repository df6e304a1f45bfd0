// Package dlq finishes mails that are DEAD: dead letter, alert, stamp.
//
// It guarantees the order publish (confirmed) → alert (committed) → stamp: a
// crash between two of them leaves the row unstamped, and the next worker or
// sweeper that meets it does all three again. So a DEAD row always ends with at
// least one dead letter and exactly one alert per incident (M6-04).
//
// It must not decide whether a mail is dead: the row says so.
package dlq

import (
	"context"
	"strconv"

	"mailproof/system/amqp"
	"mailproof/system/delivery"
	"mailproof/system/failpoint"
	"mailproof/system/notify/alerts"
	"mailproof/system/notify/doorbell"
	"mailproof/system/notify/patience"
)

// Crash points.
const (
	fpAfterPublish = "dlq.after-publish"
	fpAfterAlert   = "dlq.after-alert"
	fpAfterStamp   = "dlq.after-stamp"
)

// Stamper is the row store's part.
type Stamper interface {
	StampDLQ(ctx context.Context, rows []delivery.Row) error
}

// Alerts raises alerts.
type Alerts interface {
	Raise(ctx context.Context, a ...alerts.Alert) error
}

// Counter counts dead letters.
type Counter interface{ DeadLetter(lane, cause string) }

// Finisher finishes dead rows.
type Finisher struct {
	Store  Stamper
	Ring   doorbell.Ringer
	Alerts Alerts
	Retry  patience.Retrier
	Count  Counter
}

// Finish publishes, alerts and stamps; it returns an error only when ctx ends.
func (f Finisher) Finish(ctx context.Context, rows ...delivery.Row) error {
	if len(rows) == 0 {
		return nil
	}
	msgs := make([]amqp.Message, len(rows))
	told := make([]alerts.Alert, len(rows))
	for i, r := range rows {
		msgs[i], told[i] = doorbell.Dead(doorbell.Of(r), Reason(r)), Alert(alerts.MailDead, r)
	}
	if err := f.Ring.Ring(ctx, msgs...); err != nil {
		return err
	}
	for _, r := range rows {
		f.Count.DeadLetter(r.Type.Lane(), "dead")
	}
	failpoint.At(fpAfterPublish)
	err := f.Retry.Do(ctx, "alert", nil, func(ctx context.Context) error { return f.Alerts.Raise(ctx, told...) })
	if err != nil {
		return err
	}
	failpoint.At(fpAfterAlert)
	err = f.Retry.Do(ctx, "stamp dead letter", nil, func(ctx context.Context) error { return f.Store.StampDLQ(ctx, rows) })
	if err != nil {
		return err
	}
	failpoint.At(fpAfterStamp)
	return nil
}

// Alert says that a mail ended in a state that a person must see. It is the same
// alert however often that state is found, and another one after a replay.
func Alert(kind alerts.Kind, r delivery.Row) alerts.Alert {
	a := alerts.Alert{
		Kind: kind, Subject: r.DedupeKey, Occurrence: "version " + strconv.FormatInt(r.Version, 10),
		Attempts: r.Attempts, Detail: Reason(r),
	}
	if r.EventID != nil {
		a.EventID = *r.EventID
	}
	if kind == alerts.MailExpired && r.CampaignID != nil {
		return expiredCampaign(*r.CampaignID)
	}
	return a
}

// expiredCampaign is one alert for all mails of a campaign that expired: that
// they do so is what its sender asked for, and the campaign counts them.
func expiredCampaign(id string) alerts.Alert {
	return alerts.Alert{
		Kind: alerts.MailExpired, Subject: "campaign:" + id, Occurrence: "expired",
		Detail: "mails of the campaign were not sent in time; notifyd campaign show " + id + " counts them",
	}
}

// Reason is why the row is where it is.
func Reason(r delivery.Row) string {
	if r.LastError != nil && *r.LastError != "" {
		return *r.LastError
	}
	return "state " + string(r.Status)
}

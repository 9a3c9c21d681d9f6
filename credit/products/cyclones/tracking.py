"""Construction of tracks from the centres of cyclones at successive lead times.

The method follows the GFDL tracker (T. Marchok (2021), doi:10.1175/JAMC-D-20-0175.1): the first guess of the next
position repeats the last displacement, and the nearest centre within a limit continues the track.
"""

from __future__ import annotations

from dataclasses import dataclass

from credit.physics.great_circle import METRES_PER_DEGREE, compute_great_circle_distance
from credit.products.cyclones.detection import Centre


@dataclass(frozen=True)
class TrackPoint:
    """Point of a track: the centre of the cyclone at a lead time.

    Attributes:
        lead_minutes: lead time in minutes.
        centre: centre of the cyclone at this lead time.
    """

    lead_minutes: int
    centre: Centre


class TrackBuilder:
    """Builder of the tracks of one member of a forecast.

    Args:
        max_speed: largest distance between a centre and the first guess, divided by the interval, in m s-1.
        max_gap: longest time in minutes between two centres of a track; one interval of lead times is always allowed.
        min_duration: shortest time in minutes from the first to the last centre of a track.
    """

    def __init__(self, max_speed: float, max_gap: int, min_duration: int) -> None:
        self._max_speed = max_speed
        self._max_gap = max_gap
        self._min_duration = min_duration
        self._last_lead: int | None = None
        self._open_tracks: list[list[TrackPoint]] = []
        self._closed_tracks: list[list[TrackPoint]] = []

    def add(self, lead_minutes: int, centres: list[Centre]) -> None:
        """Continue the tracks with the centres of the next lead time, and begin new tracks with the remaining centres.

        Args:
            lead_minutes: lead time in minutes; it must be later than in all earlier calls.
            centres: centres of cyclones at this lead time.
        """
        interval = lead_minutes if self._last_lead is None else lead_minutes - self._last_lead
        self._last_lead = lead_minutes
        longest_gap = max(self._max_gap, interval)
        continuable = []
        for track in self._open_tracks:
            is_continuable = lead_minutes - track[-1].lead_minutes <= longest_gap
            (continuable if is_continuable else self._closed_tracks).append(track)
        self._open_tracks = continuable

        # All pairs of a track and a centre whose distance is within the limit.
        pairs = []
        for track_number, track in enumerate(self._open_tracks):
            seconds = 60.0 * (lead_minutes - track[-1].lead_minutes)
            limit = self._max_speed * seconds / METRES_PER_DEGREE
            latitude, longitude = predict_position(track, lead_minutes)
            for centre_number, centre in enumerate(centres):
                distance = float(compute_great_circle_distance(latitude, longitude, centre.latitude, centre.longitude))
                if distance <= limit:
                    pairs.append((distance, track_number, centre_number))
        continued: set[int] = set()
        used: set[int] = set()
        for _, track_number, centre_number in sorted(pairs):
            if track_number not in continued and centre_number not in used:
                self._open_tracks[track_number].append(TrackPoint(lead_minutes, centres[centre_number]))
                continued.add(track_number)
                used.add(centre_number)
        for centre_number, centre in enumerate(centres):
            if centre_number not in used:
                self._open_tracks.append([TrackPoint(lead_minutes, centre)])

    def finish(self) -> list[list[TrackPoint]]:
        """Return all tracks of sufficient duration, sorted by first lead time and then by lowest pressure."""
        tracks = []
        for track in [*self._closed_tracks, *self._open_tracks]:
            if track[-1].lead_minutes - track[0].lead_minutes >= self._min_duration:
                tracks.append(track)
        return sorted(tracks, key=lambda track: (track[0].lead_minutes, min(point.centre.pressure for point in track)))


def predict_position(track: list[TrackPoint], lead_minutes: int) -> tuple[float, float]:
    """Return the first guess (latitude, longitude) of a track at a later lead time by repeating its last displacement.

    Args:
        track: points of the track; if there is a single point, its position is the first guess.
        lead_minutes: lead time in minutes of the first guess.
    """
    last = track[-1]
    if len(track) == 1:
        return last.centre.latitude, last.centre.longitude
    before = track[-2]
    factor = (lead_minutes - last.lead_minutes) / (last.lead_minutes - before.lead_minutes)
    # Displacement in longitude along the shorter way around the globe, which may cross longitude 0.
    eastward = (last.centre.longitude - before.centre.longitude + 180.0) % 360.0 - 180.0
    latitude = last.centre.latitude + factor * (last.centre.latitude - before.centre.latitude)
    return max(-90.0, min(90.0, latitude)), (last.centre.longitude + factor * eastward) % 360.0

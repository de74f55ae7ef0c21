-- occupancy: how full the replicas of a model are. Changes nothing.
-- KEY ranks zset
-- KEY load hash rank -> `IN_FLIGHT SLOTS`
-- INCLUDE clock loads
-- FLAGS no-writes
-- RETURN {rank, in flight, slots ...} of each whose lease holds
local reply = {}
for _, each in ipairs(loads_of(now_ms())) do
  reply[#reply + 1], reply[#reply + 2], reply[#reply + 3] = each.rank, each.inflight, each.slots
end
return reply

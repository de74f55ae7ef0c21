-- publish_catalogue: the catalogue of models is this one from now on; every process reads its own file again, and compares.
-- KEY catalogue hash
-- ARG digest str of the tables
-- ARG tables str JSON
-- ARG first flag 1: only where nothing was ever published
-- INCLUDE clock
-- RETURN {version, the tables before or ""}
local seen = redis.call('HMGET', catalogue, 'version', 'digest', 'tables')
local version = tonumber(seen[1] or 0)
if first == 1 and seen[1] or seen[2] == digest then return {version, seen[3] or ''} end
if first == 0 then version = version + 1 end
redis.call('HSET', catalogue, 'version', version, 'digest', digest, 'tables', tables, 'at_ms', now_ms())
return {version, seen[3] or ''}
